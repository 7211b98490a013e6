"""ε of every accountant: published figures, the analytic Gaussian, order, monotony, and who answers when PRV cannot."""

import math

import pytest

from groupwise.errors import UserError
from groupwise.privacy import prv
from groupwise.privacy.accounting import epsilon_bounds
from groupwise.privacy.gaussian import gaussian_epsilon
from groupwise.privacy.pld import epsilon_pld, epsilon_pld_bounds
from groupwise.privacy.prv import epsilon_prv
from groupwise.privacy.rdp import epsilon_rdp

PUBLISHED = (1.5, 0.04, 2250, 1e-5)  # 90 epochs at rate 0.04: the setting of Opacus's own tests


@pytest.fixture
def broken_prv(monkeypatch):
    """A PRV accountant that always fails, as prv_accountant does when its quadrature gives out."""

    def fail(*_):
        raise RuntimeError("Discrete mean differs from continuous mean significantly.")

    prv._coarse.cache_clear()
    monkeypatch.setattr(prv, "_compose", fail)


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
        (1.0, 0.02, 400, 1e-5),
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
    assert bounds.upper - bounds.lower <= max(2.1 * prv.RELATIVE_ERROR * bounds.estimate, 2e-4)


@pytest.mark.parametrize("accountant", ["prv", "rdp"])
def test_epsilon_grows_with_steps_and_rate_and_falls_with_noise(accountant):
    def upper(sigma=1.0, rate=0.02, steps=300):
        return epsilon_bounds(sigma, rate, steps, 1e-5, accountant).upper

    middle = upper()
    assert upper(steps=200) < middle < upper(steps=450)
    assert upper(rate=0.01) < middle < upper(rate=0.03)
    assert upper(sigma=1.5) < middle < upper(sigma=0.8)


def test_rdp_knows_no_lower_bound_and_pld_agrees_with_prv():
    mechanism = (1.0, 0.02, 300, 1e-5)
    rdp = epsilon_bounds(*mechanism, "rdp")
    assert rdp.lower == 0.0
    assert epsilon_bounds(*mechanism, "pld").upper == pytest.approx(epsilon_prv(*mechanism).estimate, rel=2e-3)


def test_pld_answers_with_a_note_when_prv_fails(broken_prv):
    mechanism = (1.0, 0.02, 300, 1e-5)
    bounds = epsilon_bounds(*mechanism)
    assert "PLD" in bounds.note
    assert "Discrete mean" in bounds.note
    assert bounds.upper == epsilon_pld(*mechanism)
    assert bounds.lower <= bounds.upper


def test_estimates_stand_in_too(broken_prv):
    assert prv.estimate_prv(1.0, 0.02, 300, 1e-5) == epsilon_pld(1.0, 0.02, 300, 1e-5)


def test_a_second_try_is_made_with_a_wider_domain(monkeypatch):
    real, tries = prv._compose, []

    def fail_first(*arguments):
        tries.append(arguments[-1])
        if len(tries) == 1:
            raise RuntimeError("Discrete mean differs from continuous mean significantly.")
        return real(*arguments)

    monkeypatch.setattr(prv, "_compose", fail_first)
    bounds = epsilon_prv(1.0, 0.02, 300, 1e-5, eps_error=0.1)
    assert bounds.note == ""
    assert tries[1] < tries[0]


def test_bounds_widen_rather_than_fill_the_memory(monkeypatch):
    tight = epsilon_prv(1.0, 0.02, 301, 1e-5)
    monkeypatch.setattr(prv, "MAX_GRID", 2**12)
    prv._coarse.cache_clear()
    wide = epsilon_prv(1.0, 0.02, 301, 1e-5)
    assert wide.lower < tight.lower
    assert tight.upper < wide.upper


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
