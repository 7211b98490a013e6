"""ε of every accountant: published figures, the analytic Gaussian, order, monotonicity, and fallbacks for PRV."""

import logging
import math
import warnings

import prv_accountant
import pytest
from dp_accounting.pld import privacy_loss_distribution
from prv_accountant import PRVAccountant
from prv_accountant.domain import Domain
from scipy.fft import next_fast_len
from scipy.optimize import minimize_scalar
from scipy.special import erfcx
from scipy.stats import norm

from groupwise.errors import UserError
from groupwise.privacy import accountants, accounting
from groupwise.privacy.accountants import central_limit_mu, epsilon_pld, epsilon_rdp, gaussian_epsilon
from groupwise.privacy.accounting import ACCOUNTANTS, epsilon_bounds, epsilon_prv

pytestmark = pytest.mark.usefixtures("cold")
PUBLISHED = (1.5, 0.04, 2250, 1e-5)  # 90 epochs at rate 0.04: the setting of Opacus's own tests


def test_figures_published_by_opacus():
    bounds = epsilon_prv(*PUBLISHED)
    assert bounds.upper == pytest.approx(6.777395712150674, rel=1e-3)  # Opacus quotes the upper bound, as we do
    assert bounds.lower <= 6.777395712150674 <= bounds.upper
    assert epsilon_rdp(*PUBLISHED) == pytest.approx(7.32911117143, rel=1e-4)


@pytest.mark.parametrize(("sigma", "steps"), [(1.0, 1), (2.0, 10), (30.0, 500)])
def test_without_sampling_the_bounds_bracket_the_analytic_gaussian(sigma, steps):
    exact = gaussian_epsilon(1e-5, math.sqrt(steps) / sigma)
    bounds = epsilon_prv(sigma, 1.0, steps, 1e-5)
    assert bounds.lower <= exact <= bounds.upper
    assert bounds.estimate == pytest.approx(exact, rel=2e-3)
    assert exact < epsilon_pld(sigma, 1.0, steps, 1e-5) <= exact * (1 + 2e-4)
    assert exact <= epsilon_rdp(sigma, 1.0, steps, 1e-5)


@pytest.mark.parametrize(
    "mechanism",
    [
        (2.0, 0.05, 400, 1e-5),
        (12.0, 0.3, 50, 1e-5),
        pytest.param((0.7, 0.004, 1000, 1e-6), marks=pytest.mark.slow),
        pytest.param((6.9685, 0.08192, 3662, 1e-5), marks=pytest.mark.slow, id="cifar10"),
        pytest.param((0.7062, 0.015204, 1315, 4.885e-6), marks=pytest.mark.slow, id="sst2"),
    ],
)
def test_prv_is_no_looser_than_rdp_and_covers_pld(mechanism):
    """PLD composes adding and removing an example, PRV only one of them, which must not fall below the worse."""
    bounds = epsilon_prv(*mechanism)
    assert bounds.lower <= bounds.estimate <= bounds.upper <= epsilon_rdp(*mechanism)
    assert bounds.lower <= epsilon_pld(*mechanism) <= bounds.upper
    assert bounds.estimate == pytest.approx(epsilon_pld(*mechanism), rel=3e-4)
    assert bounds.upper - bounds.lower <= max(2.1 * accounting.RELATIVE_ERROR * bounds.estimate, 2e-4)


@pytest.mark.parametrize("accountant", ["prv", "rdp"])
def test_epsilon_grows_with_steps_and_rate_and_falls_with_noise(accountant):
    def upper(sigma=2.0, rate=0.2, steps=10):
        return epsilon_bounds(sigma, rate, steps, 1e-5, accountant).upper

    middle = upper()
    assert upper(steps=7) < middle < upper(steps=15)
    assert upper(rate=0.1) < middle < upper(rate=0.3)
    assert upper(sigma=3.0) < middle < upper(sigma=1.6)


def test_pld_is_used_with_a_note_when_prv_fails(broken_prv):
    mechanism = (12.0, 0.3, 50, 1e-5)
    bounds = epsilon_bounds(*mechanism)
    assert "PLD" in bounds.note
    assert "no grid of the PRV accountant passes its own checks" in bounds.note
    assert "Error" not in bounds.note and "fail" not in bounds.note  # new users read it, and the bound is valid
    assert bounds.upper == epsilon_pld(*mechanism)
    assert bounds.lower <= bounds.upper


def test_bounds_widen_if_the_grid_would_be_too_large(monkeypatch):
    tight = epsilon_prv(1.0, 0.02, 301, 1e-5)
    monkeypatch.setattr(accounting, "MAX_GRID", 2**12)
    accounting._coarse.cache_clear()
    make, grids = prv_accountant.PRVAccountant, []
    monkeypatch.setattr(prv_accountant, "PRVAccountant", lambda *a, **k: grids.append(k) or make(*a, **k))
    wide = epsilon_prv(1.0, 0.02, 301, 1e-5)
    assert wide.lower < tight.lower
    assert tight.upper < wide.upper
    tail = accounting._tail(1.0, 0.02, 301, 1e-8)
    assert all(grid["eps_max"] - tail >= grid["eps_error"] for grid in grids), "as Theorem 5.5 of Gopi et al. needs"


@pytest.mark.parametrize("accountant", ACCOUNTANTS)
@pytest.mark.parametrize("sigma", [0.0, 5e-324, 1e-160, math.nan, math.inf])
def test_negligible_and_nonfinite_noise_is_refused(accountant, sigma):
    with pytest.raises(UserError, match=r"^noise_multiplier is .*finite number of at least 1e-12"):
        epsilon_bounds(sigma, 0.1, 1, 1e-5, accountant)


@pytest.mark.parametrize("mu", [0.01, 0.3, 1.0, 20.0, 25.5, 50.0, 300.0])
@pytest.mark.parametrize("delta", [1e-9, 1e-5])
def test_gaussian_epsilon_matches_balle_and_wang(delta, mu):
    """δ(ε) = Φ(-near) - e^ε Φ(-far), where the last term is φ(near)·Φ(-far)/φ(far), since e^ε overflows."""
    epsilon = gaussian_epsilon(delta, mu)
    near, far = epsilon / mu - mu / 2, epsilon / mu + mu / 2
    found = norm.sf(near) - norm.pdf(near) * math.sqrt(math.pi / 2) * erfcx(far / math.sqrt(2))
    assert found == pytest.approx(delta, rel=1e-6)


def test_without_sampling_the_central_limit_is_exact():
    assert central_limit_mu(2.0, 1.0, 100) == 5.0
    assert central_limit_mu(2.0, 0.999999, 100) == pytest.approx(10 * math.sqrt(math.expm1(0.25)), rel=1e-5)


@pytest.mark.parametrize(("mechanism", "half"), [((1.0, 0.02, 300, 1e-5), 0.002), ((0.5, 0.02, 300, 1e-5), None)])
def test_prv_bounds_are_within_a_fifth_of_a_percent_or_0_01(mechanism, half):
    bounds = epsilon_prv(*mechanism)
    half = 0.01 if half is None else half * bounds.estimate
    assert bounds.upper - bounds.estimate == pytest.approx(half, rel=0.1)
    assert bounds.estimate - bounds.lower == pytest.approx(half, rel=0.1)


def test_no_bound_is_below_zero():
    bounds = accounting._compose(60.0, 0.001, 1, 1e-5, 0.01)
    assert bounds.lower == 0.0 <= bounds.estimate <= bounds.upper < 0.02


@pytest.fixture
def domains(monkeypatch):
    """Domains that the library makes, with their half-width and mesh."""
    create, created = Domain.create_aligned, []

    def spy(low, high, mesh):
        created.append((create(low, high, mesh), high, mesh))
        return created[-1][0]

    monkeypatch.setattr(Domain, "create_aligned", staticmethod(spy))
    accounting._coarse.cache_clear()
    return created


@pytest.mark.parametrize("steps", [1, 7, 300])
@pytest.mark.parametrize("eps_error", [0.013, 0.1])
def test_the_grid_has_the_requested_error_and_a_length_that_is_fast_for_fft(domains, steps, eps_error):
    accounting._compose(1.0, 0.02, steps, 1e-5, eps_error)
    ((domain, half_width, mesh),) = domains
    assert len(domain) % 2 == 0 and next_fast_len(len(domain), real=True) == len(domain)
    per_mesh = math.sqrt(steps / 2 * math.log(12 / 1e-8))  # Theorem 5.5 of Gopi, Lee & Wutschitz
    assert mesh * per_mesh <= eps_error * (1 + 1e-9)
    assert len(domain) <= 1.15 * (2 * half_width * per_mesh / eps_error + 2)
    assert half_width == accounting._tail(1.0, 0.02, steps, 1e-8) + eps_error


@pytest.mark.parametrize(("sigma", "rate", "steps"), [(1.0, 0.02, 1), (0.6, 1e-3, 1), (1.0, 1.0, 25), (3.0, 1.0, 400)])
def test_losses_leave_the_domain_no_more_often_than_the_theorem_allows(sigma, rate, steps):
    """A step's loss has a distribution function; without sampling the sum is normal, of mean μ²/2 and variance μ²."""
    width = accounting._tail(sigma, rate, steps, 1e-8)
    one = accounting._loss(sigma, rate)
    assert 1 - one.cdf(width) + one.cdf(-width) <= 1e-8 / (6 * steps)
    if rate == 1.0:
        mu = math.sqrt(steps) / sigma
        outside = norm.sf(width / mu - mu / 2) + norm.cdf(-width / mu - mu / 2)
        assert 1e-14 < outside <= 1e-8 / 3


@pytest.mark.parametrize(
    "mechanism",
    [
        *((1.9, 256 / 60_000, 1, 1e-6), (7.1, 1024 / 60_000, 1, 1e-6), (0.68, 2.56e-4, 10, 1e-7)),
        *((0.55, 2.56e-5, 1, 1e-8), (0.36, 2.56e-5, 1, 1e-8), (28.0, 4096 / 60_000, 1000, 1e-6)),
    ],
)
def test_small_samples_and_few_steps_take_a_small_grid(domains, monkeypatch, mechanism):
    """These took up to four minutes and gigabytes when losses were rounded to 1/1000 of a step's spread."""
    losses = []
    real = privacy_loss_distribution.from_gaussian_mechanism

    def spy(*arguments, **named):
        losses.append(real(*arguments, **named))
        return losses[-1]

    monkeypatch.setattr(privacy_loss_distribution, "from_gaussian_mechanism", spy)
    bounds = epsilon_bounds(*mechanism)
    sizes = [len(domain) for domain, *_ in domains] + [pld._pmf_remove.size for pld in losses]
    assert max(sizes) < 400_000
    assert bounds.estimate == pytest.approx(epsilon_pld(*mechanism), rel=3e-4)


@pytest.mark.parametrize("bounds", [(0.9, math.nan, 1.1), (-math.inf, 1.0, 1.1), (math.nan,) * 3])
def test_nonfinite_bounds_of_prv_are_replaced_by_plds(monkeypatch, bounds):
    monkeypatch.setattr(PRVAccountant, "compute_epsilon", lambda *_: bounds)
    accounting._coarse.cache_clear()
    assert epsilon_prv(2.0, 1.0, 3, 1e-5).note.startswith("by the PLD accountant, since")


def test_rdp_is_used_with_a_note_when_prv_and_pld_fail(broken_prv, monkeypatch):
    def fail(*_):
        raise MemoryError

    monkeypatch.setattr(accounting, "epsilon_pld", fail)
    for accountant in ("prv", "pld"):
        bounds = epsilon_bounds(12.0, 0.3, 50, 1e-5, accountant)
        assert bounds.upper == epsilon_rdp(12.0, 0.3, 50, 1e-5)
        assert bounds.note.startswith(f"by the RDP accountant, since the {accountant.upper()} accountant fails")


def test_accountants_are_silent(caplog):
    logger = logging.getLogger("absl")
    before = logger.level
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        accounting._compose(2.0, 1.0, 3, 1e-5, 0.1)
        accounting._coarse.cache_clear()
    with caplog.at_level(logging.INFO, logger="absl"):
        epsilon_rdp(0.3, 0.1, 100, 1e-5)
        assert not caplog.records
        assert logger.level == logging.INFO, "the level is put back"
    assert logger.level == before


@pytest.mark.parametrize(("sigma", "steps"), [(0.5, 1), (5.0, 30), (90.0, 10)])
def test_the_choice_of_orders_costs_rdp_at_most_half_a_percent(sigma, steps):
    """Without sampling the curve is α/2σ² a step, and the best order is found by a search."""

    def epsilon(order):
        converted = math.log1p(-1 / order) - (math.log(1e-5) + math.log(order)) / (order - 1)
        return steps * order / (2 * sigma**2) + converted

    best = minimize_scalar(epsilon, bounds=(1.01, 5000), method="bounded", options={"xatol": 1e-6}).fun
    assert best * (1 - 1e-9) <= epsilon_rdp(sigma, 1.0, steps, 1e-5) <= best * 1.005


@pytest.mark.parametrize(
    "mechanism",
    [(2.0, 0.02, 30, 1e-5), (0.5, 0.1, 4, 1e-5), (1.0, 0.5, 3, 1e-5), (0.6, 1e-3, 2000, 1e-7), (0.6, 1e-5, 99, 1e-6)],
)
def test_a_finer_mesh_hardly_changes_pld(monkeypatch, mechanism):
    usual = epsilon_pld(*mechanism)
    monkeypatch.setattr(accountants, "MESH", accountants.MESH / 4)
    monkeypatch.setattr(accountants, "FINEST", accountants.FINEST / 4)
    finer = epsilon_pld(*mechanism)
    assert finer <= usual <= finer * (1 + 2e-4)
