"""What a search costs: closed forms, another library, and small mechanisms whose search is enumerated exactly."""

import math
from itertools import islice

import dp_accounting
import numpy as np
import pytest
from dp_accounting import rdp
from scipy.stats import norm

from groupwise.errors import UserError
from groupwise.privacy import tuning
from groupwise.privacy.accountants import ORDERS, epsilon_rdp, training_event
from groupwise.privacy.tuning import (
    LAMBDA,
    Training,
    TruncatedNegativeBinomial,
    calibrate_search,
    curve_epsilon,
    rdp_curve,
    search_cost,
    search_curve,
)
from tests.few_orders import few_orders

RESPONSE = np.array([0.55, 0.25, 0.15, 0.05])
"""Three scores and a rare one."""
LAWS = [
    TruncatedNegativeBinomial(-0.5, 0.05),
    TruncatedNegativeBinomial(0.0, 0.01),
    TruncatedNegativeBinomial(1.0, 0.02),
    TruncatedNegativeBinomial(3.0, 0.1),
]


def divergence(order, here, there):
    """D_λ of two finite laws, from its definition."""
    kept = here > 0
    logs = order * np.log(here[kept]) + (1 - order) * np.log(there[kept])
    return float(np.logaddexp.reduce(logs)) / (order - 1)


def best_of(law, outputs):
    """The law of the best output of K, by enumeration over k."""
    upto = np.concatenate([[0.0], np.cumsum(outputs)])
    return sum(float(probability) * np.diff(upto**k) for k, probability in islice(law.probabilities(), 3000))


def both_ways(order, one, other):
    return max(divergence(order, one, other), divergence(order, other, one))


def gaussian(shift, sigma=2.0):
    """A Gaussian release, read in forty cells from the worst to the best."""
    edges = np.concatenate([[-np.inf], np.linspace(-8, 8, 39), [np.inf]])
    return np.diff(norm.cdf(edges, loc=shift, scale=sigma))


PAIRS = {
    "randomised response": (RESPONSE, np.array([0.45, 0.27, 0.18, 0.10])),
    "the rare one doubled": (RESPONSE, np.array([0.50, 0.25, 0.15, 0.10])),
    "gaussian": (gaussian(0.0), gaussian(1.0)),
}


@pytest.mark.parametrize("law", LAWS, ids=str)
@pytest.mark.parametrize("pair", PAIRS)
def test_no_search_that_can_be_enumerated_passes_the_bound(law, pair):
    one, other = PAIRS[pair]
    curve = np.array([both_ways(order, one, other) for order in ORDERS])
    bound = search_curve(curve, law)
    best, best_other = best_of(law, one), best_of(law, other)
    assert best.sum() == pytest.approx(1.0, abs=1e-9)
    for at in range(0, len(ORDERS), 7):
        assert both_ways(LAMBDA[at], best, best_other) <= bound[at] + 1e-9


def test_the_enumeration_sees_a_claim_that_is_too_low():
    """The cost of one run, claimed for the best of a fixed many, is what a search without accounting claims."""
    one, other = PAIRS["the rare one doubled"]

    class Fixed:
        def probabilities(self):
            yield 60, 1.0

    run = both_ways(4.0, one, other)
    assert both_ways(4.0, best_of(Fixed(), one), best_of(Fixed(), other)) > 3 * run
    law = TruncatedNegativeBinomial(1.0, 0.02)
    assert both_ways(4.0, best_of(law, one), best_of(law, other)) > 1.5 * run  # a random many is not free either


def test_pure_privacy_costs_two_and_eta():
    """Corollary 3: of ε-DP runs the best is (2+η)ε-DP; for η = 1 the 3ε of Liu and Talwar (2019)."""
    large = np.geomspace(10.0, 1e9, 200)
    for eta in (-0.5, 0.0, 1.0, 2.0):
        law = TruncatedNegativeBinomial.with_mean(eta, 30.0)
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(tuning, "LAMBDA", large)
            assert search_curve(np.full(200, 0.7), law)[-1] == pytest.approx((2 + eta) * 0.7, rel=1e-6)


@pytest.mark.parametrize(("eta", "rho"), [(0.0, 0.1), (1.0, 0.1), (-0.5, 0.01)])
def test_concentrated_privacy_has_a_closed_form(eta, rho):
    """Corollary 4: (1+η)(2√(ρ log(1/γ)) - ρ) beside ρλ + log E[K]/(λ-1), which is least at λ = 1 + √(log E[K]/ρ)."""
    law = TruncatedNegativeBinomial.with_mean(eta, 10.0)
    fine = 1.0 + np.geomspace(1e-2, 1e3, 20_000)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(tuning, "LAMBDA", fine)
        found = search_curve(rho * fine, law)
    best = (1 + eta) * (2 * math.sqrt(rho * -math.log(law.gamma)) - rho)
    turn = 1 + math.sqrt(math.log(10) / rho)
    printed = rho * fine + best + math.log(10) / (fine - 1)
    above = fine >= turn
    assert found[above] == pytest.approx(printed[above], rel=1e-4)
    assert found[~above] == pytest.approx(rho * turn + best + math.sqrt(rho * math.log(10)), rel=1e-4)


@pytest.mark.parametrize("shape", [0.0, 0.5, 1.0, 4.0])
def test_another_library_has_the_same_curve(shape):
    event = dp_accounting.SelfComposedDpEvent(training_event(1.1, 0.02), 500)
    theirs = rdp.RdpAccountant(orders=ORDERS)
    theirs.compose(dp_accounting.dp_event.RepeatAndSelectDpEvent(event, 20.0, shape))
    law = TruncatedNegativeBinomial.with_mean(shape, 20.0)
    ours = search_curve(rdp_curve([Training(1.1, 0.02, 500)]), law)
    least = np.minimum.accumulate(theirs.rdp[::-1])[::-1]  # what holds at an order holds below it
    assert ours == pytest.approx(least, rel=1e-5)


def test_settings_cost_their_maximum_order_by_order():
    one, other = Training(0.8, 0.01, 100), Training(3.0, 0.3, 100)
    curve = rdp_curve([one, other])
    assert (curve >= rdp_curve([one])).all() and (curve >= rdp_curve([other])).all()
    assert 0 < np.sum(curve > rdp_curve([one])) < len(ORDERS)  # neither is the larger at all orders
    shares = [math.exp((LAMBDA[9] - 1) * rdp_curve([training])[9]) for training in (one, other)]
    assert (LAMBDA[9] - 1) * curve[9] >= math.log(sum(shares) / 2)


def test_one_setting_is_the_rdp_accountant_s():
    assert curve_epsilon(rdp_curve([Training(1.0, 0.02, 300)]), 1e-5) == pytest.approx(
        epsilon_rdp(1.0, 0.02, 300, 1e-5)
    )


def test_a_search_costs_more_than_a_run_and_less_than_a_large_grid():
    trainings = [Training(0.8, 0.015, 1300)] * 27
    cost = search_cost(trainings, TruncatedNegativeBinomial.with_mean(0.0, 27.0), 1e-5, "rdp")
    assert cost.one_run < cost.search < 0.4 * cost.grid


@pytest.fixture
def at_few_orders(tmp_path):
    with few_orders(tmp_path):
        yield


def test_a_calibrated_search_keeps_its_target_and_wastes_none(at_few_orders):
    count = TruncatedNegativeBinomial.with_mean(0.0, 12.0)
    rates = [(0.01, 200), (0.04, 50)]
    sigmas = calibrate_search(rates, count, 3.0, 1e-5)
    trainings = [Training(sigma, *rate) for sigma, rate in zip(sigmas, rates, strict=True)]
    assert 0.997 * 3.0 <= search_cost(trainings, count, 1e-5, "rdp").search <= 3.0
    assert sigmas[0] < sigmas[1]  # smaller batches need less noise for the same
    each = [epsilon_rdp(t.noise_multiplier, t.sample_rate, t.steps, 1e-5) for t in trainings]
    assert max(each) < 1.002 * min(each)


def test_what_no_noise_reaches_is_refused():
    with pytest.raises(UserError, match=r"epsilon = 0.01 cannot be reached: .* 100 expected runs .* cost 0\.0"):
        calibrate_search([(0.01, 100)], TruncatedNegativeBinomial.with_mean(0.0, 100.0), 0.01, 1e-5)
    with pytest.raises(UserError, match="too little noise"):
        search_cost([Training(1e-160, 0.5, 10_000)], TruncatedNegativeBinomial(0.0, 0.1), 1e-5)
    with pytest.raises(UserError, match="noise_multiplier is 0"):
        search_cost([Training(0.0, 0.5, 10)], TruncatedNegativeBinomial(0.0, 0.1), 1e-5)
