"""ε and σ where numerical composition fails: extreme noise, budgets, δ and numbers of steps."""

import math
import warnings

import pytest
from scipy.integrate import quad
from scipy.stats import norm

from groupwise.privacy import accounting
from groupwise.privacy.accountants import MOST_NOISE, ORDERS, epsilon_rdp, gaussian_epsilon, rdp_of_steps
from groupwise.privacy.accounting import ACCOUNTANTS, epsilon_bounds
from groupwise.privacy.calibration import calibrate
from groupwise.privacy.plan import make_plan

pytestmark = pytest.mark.usefixtures("cold")
RATE, STEPS, DELTA = 0.1, 100, 1e-5


@pytest.mark.parametrize(
    "epsilon", [*(pytest.param(tiny, marks=pytest.mark.slow) for tiny in (1e-15, 1e-8)), 1e-4, 0.01, 200.0, 1e4, 1e8]
)
def test_the_smallest_and_largest_targets_are_met_in_a_few_evaluations(epsilon):
    sigma, found = calibrate(epsilon, DELTA, RATE, STEPS)
    assert found.upper <= epsilon and found.note
    if epsilon > 1e-9:  # below, rounding alone moves it by more
        assert found.upper >= 0.99 * epsilon
    assert epsilon_bounds(sigma, RATE, STEPS, DELTA).upper == found.upper


def test_extreme_targets_without_sampling_match_the_analytic_gaussian():
    for epsilon in (1e-3, 0.02, 300.0, 1e5):
        sigma = calibrate(epsilon, DELTA, 1.0, STEPS)[0]
        exact = gaussian_epsilon(DELTA, math.sqrt(STEPS) / sigma)
        assert 0.98 * epsilon <= exact <= epsilon


@pytest.mark.parametrize("sigma", [60.0, *(pytest.param(large, marks=pytest.mark.slow) for large in (300.0, 2000.0))])
def test_pld_replaces_prv_for_small_epsilon_and_agrees_with_it(sigma):
    fallback = epsilon_bounds(sigma, RATE, 10, DELTA)
    assert "PLD" in fallback.note
    slow = accounting._compose(sigma, RATE, 10, DELTA, 0.02 * fallback.upper)
    assert slow.lower <= fallback.upper <= slow.upper
    assert fallback.upper == pytest.approx(slow.estimate, rel=5e-3)


@pytest.mark.parametrize("accountant", ACCOUNTANTS)
@pytest.mark.parametrize("sigma", [1e-7, 1e-4, 0.01, 1e4, 1e9, 1e15])
def test_every_noise_multiplier_has_an_epsilon_and_no_accountant_warns(accountant, sigma):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan = make_plan(
            dataset_size=5000, expected_batch_size=500, steps=STEPS, delta=DELTA, noise_multiplier=sigma,
            accountant=accountant,
        )  # fmt: skip
    assert 0.0 <= plan.epsilon < math.inf
    assert plan.spent(STEPS).epsilon <= plan.epsilon
    assert accountant != "prv" or "PLD" in plan.note or "RDP" in plan.note


def test_a_small_sample_of_many_examples_costs_little_by_rdp_too():
    """One step's Rényi divergence at order 8, from its definition by quadrature, and what a million of them cost."""
    rate, alpha, steps = 1e-6, 8, 10**6

    def moment(x):
        return norm.pdf(x) * ((1 - rate) + rate * math.exp(x - 0.5)) ** alpha - norm.pdf(x)

    exact = math.log1p(quad(moment, -10, 30, epsabs=1e-22, limit=500)[0]) / (alpha - 1)
    found = rdp_of_steps(1.0, rate, 1)[ORDERS.index(alpha)]
    assert exact <= found * (1 + 1e-3) and found <= max(1.001 * exact, alpha / (2 * MOST_NOISE**2))
    assert 0.6 < epsilon_rdp(1.0, rate, steps, 1e-9) < 0.75
    assert calibrate(3.0, 1e-9, rate, steps, accountant="rdp")[0] < 1.0
    for sigma in (0.5, 1.0, 5.0, 1e3, 1e6, 1e300):  # more noise never costs more
        assert epsilon_rdp(2 * sigma, rate, steps, 1e-9) <= epsilon_rdp(sigma, rate, steps, 1e-9)


@pytest.mark.parametrize(
    "delta",
    [*(pytest.param(large, marks=pytest.mark.slow) for large in (0.99, 0.5)), 0.02, 1e-11, 1e-13, 1e-100, 1e-320],
)
def test_every_delta_can_be_calibrated(delta):
    _, found = calibrate(1.0, delta, RATE, STEPS)
    assert 0.99 <= found.upper <= 1.0
    assert ("RDP" in found.note) == (delta < 1e-12)


@pytest.mark.parametrize("steps", [1, 10**9, 10**15, 2**62])
@pytest.mark.parametrize("sigma", [1e-3, 1e9])
def test_any_number_of_steps_has_a_finite_epsilon(steps, sigma):
    bounds = epsilon_bounds(sigma, 1e-5, steps, DELTA)
    assert 0.0 <= bounds.upper < math.inf


@pytest.mark.parametrize("accountant", ["prv", "pld"])
def test_an_epsilon_too_large_to_compose_is_bounded_by_rdp(accountant):
    bounds = epsilon_bounds(1e-3, RATE, STEPS, DELTA, accountant)
    assert bounds.upper == epsilon_rdp(1e-3, RATE, STEPS, DELTA)
    assert bounds.note.startswith("by the RDP accountant, since")


def test_rdp_is_never_rounded_to_zero():
    """With so much noise a step costs less than the rounding error of the sums that compute its cost."""
    few = epsilon_rdp(1e4, RATE, 10**6, 1e-9)
    assert few > 0.0
    for sigma in (1e7, 1e9, 1e12):
        assert epsilon_rdp(sigma, RATE, 10**14, 1e-9) > 0.0
