"""ε of every accountant: published figures, the analytic Gaussian, order, monotony, and who answers when PRV cannot."""

import itertools
import logging
import math
import warnings

import pytest
from prv_accountant import PRVAccountant
from prv_accountant.accountant import compute_safe_domain_size
from prv_accountant.domain import Domain
from scipy.fft import next_fast_len
from scipy.optimize import minimize_scalar

from groupwise.errors import UserError
from groupwise.privacy import accountants as pld
from groupwise.privacy import accounting
from groupwise.privacy.accountants import (
    ORDERS,
    EpsilonBounds,
    epsilon_pld,
    epsilon_pld_bounds,
    epsilon_rdp,
    gaussian_epsilon,
)
from groupwise.privacy.accounting import epsilon_bounds, epsilon_prv

pytestmark = pytest.mark.usefixtures("cold")
PUBLISHED = (1.5, 0.04, 2250, 1e-5)  # 90 epochs at rate 0.04: the setting of Opacus's own tests


@pytest.fixture
def broken_prv(monkeypatch):
    """A PRV accountant that always fails, as prv_accountant does when its quadrature gives out."""

    def fail(*_):
        raise RuntimeError("Discrete mean differs from continuous mean significantly.")

    accounting._coarse.cache_clear()
    monkeypatch.setattr(accounting, "_compose", fail)


def test_figures_published_by_opacus():
    bounds = epsilon_prv(*PUBLISHED)
    assert bounds.upper == pytest.approx(6.777395712150674, rel=1e-3)  # Opacus quotes the upper bound, as we do
    assert bounds.lower <= 6.777395712150674 <= bounds.upper
    assert epsilon_rdp(*PUBLISHED) == pytest.approx(7.32911117143, rel=1e-4)


@pytest.mark.parametrize(("sigma", "steps"), [(1.0, 1), (2.0, 10), (30.0, 500)])
def test_without_sampling_the_bounds_bracket_the_analytic_gaussian(sigma, steps):
    exact = gaussian_epsilon(1e-5, math.sqrt(steps) / sigma)
    for bounds in (epsilon_prv(sigma, 1.0, steps, 1e-5), epsilon_pld_bounds(sigma, 1.0, steps, 1e-5)):
        assert bounds.lower <= exact <= bounds.upper
        assert bounds.estimate == pytest.approx(exact, rel=2e-3)
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
    """PLD composes both directions, adding and removing an example: PRV's one must not fall below their worse."""
    bounds = epsilon_prv(*mechanism)
    both_directions = epsilon_pld_bounds(*mechanism)
    assert bounds.lower <= bounds.estimate <= bounds.upper <= epsilon_rdp(*mechanism)
    assert both_directions.lower <= bounds.upper
    assert bounds.lower <= both_directions.upper
    assert bounds.upper - bounds.lower <= max(2.1 * accounting.RELATIVE_ERROR * bounds.estimate, 2e-4)


@pytest.mark.parametrize("accountant", ["prv", "rdp"])
def test_epsilon_grows_with_steps_and_rate_and_falls_with_noise(accountant):
    def upper(sigma=2.0, rate=0.2, steps=10):
        return epsilon_bounds(sigma, rate, steps, 1e-5, accountant).upper

    middle = upper()
    assert upper(steps=7) < middle < upper(steps=15)
    assert upper(rate=0.1) < middle < upper(rate=0.3)
    assert upper(sigma=3.0) < middle < upper(sigma=1.6)


def test_rdp_knows_no_lower_bound_and_pld_agrees_with_prv():
    mechanism = (12.0, 0.3, 50, 1e-5)
    rdp = epsilon_bounds(*mechanism, "rdp")
    assert rdp.lower == 0.0
    assert epsilon_bounds(*mechanism, "pld").upper == pytest.approx(epsilon_prv(*mechanism).estimate, rel=2e-3)


def test_pld_answers_with_a_note_when_prv_fails(broken_prv):
    mechanism = (12.0, 0.3, 50, 1e-5)
    bounds = epsilon_bounds(*mechanism)
    assert "PLD" in bounds.note
    assert "finds no grid for these numbers that passes its own checks" in bounds.note
    assert "Error" not in bounds.note and "fail" not in bounds.note  # a first run reads it, and its bound holds
    assert bounds.upper == epsilon_pld(*mechanism)
    assert bounds.lower <= bounds.upper


def test_estimates_stand_in_too(broken_prv):
    assert accounting.estimate_prv(12.0, 0.3, 50, 1e-5) == epsilon_pld(12.0, 0.3, 50, 1e-5)


def test_a_second_try_is_made_with_a_wider_domain(monkeypatch):
    real, tries = accounting._compose, []

    def fail_first(*arguments):
        tries.append(arguments[-1])
        if len(tries) == 1:
            raise RuntimeError("Discrete mean differs from continuous mean significantly.")
        return real(*arguments)

    monkeypatch.setattr(accounting, "_compose", fail_first)
    bounds = epsilon_prv(1.0, 0.02, 300, 1e-5, eps_error=0.1)
    assert bounds.note == ""
    assert tries[1] < tries[0]


def test_bounds_widen_rather_than_fill_the_memory(monkeypatch):
    tight = epsilon_prv(1.0, 0.02, 301, 1e-5)
    monkeypatch.setattr(accounting, "MAX_GRID", 2**12)
    accounting._coarse.cache_clear()
    wide = epsilon_prv(1.0, 0.02, 301, 1e-5)
    assert wide.lower < tight.lower
    assert tight.upper < wide.upper


@pytest.mark.parametrize(("points", "error"), [(accounting.MAX_GRID // 100, 2e-3), (4 * accounting.MAX_GRID, 0.12)])
def test_the_bracket_is_a_share_of_epsilon_or_what_the_largest_grid_allows(monkeypatch, points, error):
    monkeypatch.setattr(accounting, "_coarse", lambda *mechanism: (EpsilonBounds(0.9, 1.0, 1.1), points, 0.03))
    assert accounting._default_error(1.0, 0.02, 300, 1e-5) == pytest.approx(error)


@pytest.mark.parametrize("accountant", ["prv", "pld", "rdp"])
@pytest.mark.parametrize(
    ("mechanism", "reason"),
    [
        ((0.0, 0.1, 1, 1e-5), "noise_multiplier"),
        ((math.nan, 0.1, 1, 1e-5), "noise_multiplier"),
        ((math.inf, 0.1, 1, 1e-5), "noise_multiplier"),
        ((1.0, 0.0, 1, 1e-5), "sample_rate"),
        ((1.0, 1.1, 1, 1e-5), "sample_rate"),
        ((1.0, 0.1, 0, 1e-5), "steps"),
        ((1.0, 0.1, 1.5, 1e-5), "steps"),
        ((1.0, 0.1, math.nan, 1e-5), "steps"),
        ((1.0, 0.1, True, 1e-5), "steps"),
        ((1.0, 0.1, 1, 0.0), "delta"),
        ((1.0, 0.1, 1, 1.0), "delta"),
        ((1.0, 0.1, 1, math.nan), "delta"),
    ],
)
def test_refusals(accountant, mechanism, reason):
    with pytest.raises(UserError, match=reason):
        epsilon_bounds(*mechanism, accountant)


def test_an_unknown_accountant_is_refused():
    with pytest.raises(UserError, match="choose one of prv, pld, rdp"):
        epsilon_bounds(1.0, 0.1, 1, 1e-5, "gdp")


@pytest.mark.slow
@pytest.mark.parametrize("mechanism", [(0.2, 0.1, 1000, 1e-5), (0.3, 0.1, 2000, 1e-5)])
def test_hopelessly_little_noise_still_has_an_upper_bound(mechanism):
    bounds = epsilon_bounds(*mechanism)
    assert 100.0 < bounds.upper <= 1.05 * epsilon_rdp(*mechanism)


@pytest.mark.parametrize("accountant", [epsilon_prv, epsilon_pld, epsilon_rdp])
def test_each_accountant_refuses_by_itself(accountant):
    with pytest.raises(UserError, match="noise_multiplier"):
        accountant(0.0, 0.1, 1, 1e-5)
    with pytest.raises(UserError, match="steps"):
        accountant(1.0, 0.1, 0.5, 1e-5)


@pytest.mark.parametrize(("mechanism", "half"), [((1.0, 0.02, 300, 1e-5), 0.002), ((0.5, 0.02, 300, 1e-5), None)])
def test_prv_brackets_to_a_fifth_of_a_percent_or_to_a_hundredth(mechanism, half):
    bounds = epsilon_prv(*mechanism)
    half = 0.01 if half is None else half * bounds.estimate
    assert bounds.upper - bounds.estimate == pytest.approx(half, rel=0.1)
    assert bounds.estimate - bounds.lower == pytest.approx(half, rel=0.1)


def test_no_bound_is_below_zero():
    bounds = epsilon_prv(60.0, 0.001, 1, 1e-5, eps_error=0.01)
    assert bounds.lower == 0.0 <= bounds.estimate <= bounds.upper < 0.02


@pytest.mark.parametrize("steps", [1, 7, 300])
@pytest.mark.parametrize("eps_error", [0.013, 0.1])
def test_the_grid_is_the_one_that_was_meant_and_a_fast_one(monkeypatch, steps, eps_error):
    """The library's own domain has the length that we work out, which has small prime factors, and the error asked."""
    create, made = Domain.create_aligned, []

    def spy(low, high, mesh):
        made.append((create(low, high, mesh), high, mesh))
        return made[-1][0]

    monkeypatch.setattr(Domain, "create_aligned", staticmethod(spy))
    _, grid = accounting._compose(1.0, 0.02, steps, 1e-5, eps_error, 1e-8)
    ((domain, half_width, mesh),) = made
    assert len(domain) == grid
    assert grid % 2 == 0 and next_fast_len(grid, real=True) == grid
    per_mesh = math.sqrt(steps / 2 * math.log(12 / 1e-8))  # Theorem 5.5 of Gopi, Lee & Wutschitz
    assert mesh * per_mesh <= eps_error * (1 + 1e-9)
    assert grid <= 1.15 * (2 * half_width * per_mesh / eps_error + 2)
    safe = compute_safe_domain_size([accounting._mechanism(1.0, 0.02)], [steps], eps_error, 1e-8)
    assert half_width == safe


def test_a_grid_is_never_coarser_than_asked_nor_much_finer_and_always_fast():
    for eps_error in [0.003 * 1.01**k for k in range(300)]:
        error, points = accounting._smooth_grid(20.0, eps_error, 5.0)
        assert points % 2 == 0 and next_fast_len(points, real=True) == points
        assert 0.8 * eps_error <= error <= eps_error
        assert points == 2 * math.ceil(20.0 * 5.0 / error) + 2


def test_no_grid_passes_the_largest(monkeypatch):
    monkeypatch.setattr(accounting, "MAX_GRID", 2**12)
    _, grid = accounting._compose(1.0, 0.02, 300, 1e-5, 1e-6, 1e-8)
    assert 2**11 < grid <= 1.1 * 2**12


@pytest.mark.parametrize("mechanism", [(1.0, 0.02, 300, 1e-5), (0.45, 0.02, 400, 1e-5), (2.0, 1.0, 200, 1e-5)])
def test_an_estimate_takes_a_small_grid(mechanism):
    """A tenth of a second, from a small ε to one of 54."""
    bounds, grid, error = accounting._coarse(*mechanism)
    assert 10_000 < grid < 30_000
    assert 0.02 * min(bounds.estimate, 10) < error < 0.04 * min(bounds.estimate, 10)
    assert bounds.upper - bounds.lower <= 2 * error * 1.01


def test_an_estimate_is_close():
    for sigma, steps in ((1.0, 1), (2.0, 10), (40.0, 10)):
        exact = gaussian_epsilon(1e-5, math.sqrt(steps) / sigma)
        assert accounting.estimate_prv(sigma, 1.0, steps, 1e-5) == pytest.approx(exact, rel=1e-3)


@pytest.mark.parametrize("bounds", [(0.9, math.nan, 1.1), (-math.inf, 1.0, 1.1), (math.nan,) * 3])
def test_bounds_that_are_not_finite_are_not_believed(monkeypatch, bounds):
    monkeypatch.setattr(PRVAccountant, "compute_epsilon", lambda *_: bounds)
    accounting._coarse.cache_clear()
    assert epsilon_prv(2.0, 1.0, 3, 1e-5).note.startswith("by the PLD accountant, since")


def test_both_tries_have_the_errors_that_are_promised(monkeypatch):
    tries = []

    def fail(*arguments):
        tries.append(arguments[-1])
        raise ValueError

    monkeypatch.setattr(accounting, "_compose", fail)
    assert epsilon_prv(2.0, 1.0, 3, 1e-5, eps_error=0.1).note.startswith("by the PLD accountant, since")
    assert tries == pytest.approx([1e-8, 1e-10])


def test_accountants_are_silent(caplog):
    logger = logging.getLogger("absl")
    before = logger.level
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        epsilon_prv(2.0, 1.0, 3, 1e-5, eps_error=0.1)
        accounting._coarse.cache_clear()
    with caplog.at_level(logging.INFO, logger="absl"):
        epsilon_rdp(0.3, 0.1, 100, 1e-5)
        assert not caplog.records
        assert logger.level == logging.INFO, "the level is put back"
    assert logger.level == before


def test_rdp_orders_are_dense_where_they_matter():
    assert (ORDERS[0], ORDERS[-1]) == (1.1, 1024)
    for order, following in itertools.pairwise(ORDERS):
        step = 0.1 if order < 10.95 else 1 if order < 64 else 8 if order < 248 else 64
        assert following - order == pytest.approx(step) or (order, following) == (248, 256)


@pytest.mark.parametrize(("sigma", "steps"), [(0.5, 1), (5.0, 30), (90.0, 10)])
def test_rdp_misses_little_by_its_choice_of_orders(sigma, steps):
    """Without sampling the curve is α/2σ² a step, and the best order is found by a search."""

    def epsilon(order):
        converted = math.log1p(-1 / order) - (math.log(1e-5) + math.log(order)) / (order - 1)
        return steps * order / (2 * sigma**2) + converted

    best = minimize_scalar(epsilon, bounds=(1.01, 5000), method="bounded", options={"xatol": 1e-6}).fun
    assert best * (1 - 1e-9) <= epsilon_rdp(sigma, 1.0, steps, 1e-5) <= best * 1.005


def test_pld_rounds_losses_as_finely_as_it_says(monkeypatch):
    mechanism = (2.0, 0.02, 30, 1e-5)
    coarse = epsilon_pld(*mechanism, interval=0.05)
    assert coarse > epsilon_pld(*mechanism) * 1.001
    wide, few = (1.0, 0.1, 300, 1e-5), (0.5, 0.1, 4, 1e-5)
    for of, epsilon, interval in (
        *((wide, 0.1, 1e-4), (wide, 9.9, 1e-4), (wide, 20.0, 4e-4), (wide, 90.0, 8.1e-3), (wide, 300.0, 0.03)),
        *((few, 0.1, 1e-4), (few, 2.0, 5e-4), (few, 9.9, 1e-3), (few, 20.0, 1e-3)),
    ):
        monkeypatch.setattr("groupwise.privacy.accountants.epsilon_rdp", lambda *_, epsilon=epsilon: epsilon)
        assert pld._interval(*of) == pytest.approx(interval)


def test_few_steps_are_bounded_as_well_from_losses_rounded_ten_times_as_coarsely():
    mechanism = (1.0, 0.5, 3, 1e-5)
    assert pld._interval(*mechanism) == pytest.approx(1e-3)
    bounds = epsilon_pld_bounds(*mechanism)
    fine = epsilon_pld(*mechanism, interval=1e-4)
    assert fine <= bounds.upper <= fine * (1 + 1e-6) and bounds.lower > fine * (1 - 1e-3)


def test_pld_brackets_the_analytic_gaussian_strictly(monkeypatch):
    monkeypatch.setattr(pld, "_interval", lambda *_: 0.01)
    exact = gaussian_epsilon(1e-5, 1 / 2.0)
    bounds = epsilon_pld_bounds(2.0, 1.0, 1, 1e-5)
    assert 1e-5 * exact < exact - bounds.lower < 0.02
    assert 0 < bounds.upper - exact < 0.02
