"""The closed forms against an independent formula and their own inverse."""

import math

import pytest
import torch
from scipy.special import erfcx
from scipy.stats import norm

from groupwise.privacy.accountants import central_limit_mu, gaussian_delta, gaussian_epsilon
from groupwise.privacy.calibration import calibrate
from groupwise.privacy.mechanism import noise_stds
from groupwise.privacy.plan import make_plan
from groupwise.privacy.sampling import PoissonSampler, ShuffleSampler


@pytest.mark.parametrize("mu", [0.05, 0.5, 1.0, 5.0])
@pytest.mark.parametrize("epsilon", [0.0, 0.1, 1.0, 8.0])
def test_delta_is_that_of_balle_and_wang(epsilon, mu):
    expected = norm.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon) * norm.cdf(-mu / 2 - epsilon / mu)
    assert gaussian_delta(epsilon, mu) == pytest.approx(expected, rel=1e-6, abs=1e-15)


@pytest.mark.parametrize("mu", [0.01, 0.3, 1.0, 20.0, 200.0])
def test_epsilon_inverts_delta(mu):
    epsilon = gaussian_epsilon(1e-5, mu)
    assert gaussian_delta(epsilon, mu) == pytest.approx(1e-5, rel=1e-6)


def test_a_large_delta_costs_nothing():
    assert gaussian_epsilon(0.5, 0.1) == 0.0
    assert gaussian_delta(1.0, 0.0) == 0.0


def test_without_sampling_the_central_limit_is_exact():
    assert central_limit_mu(2.0, 1.0, 100) == 5.0
    assert central_limit_mu(2.0, 0.999999, 100) == pytest.approx(10 * math.sqrt(math.expm1(0.25)), rel=1e-5)


@pytest.mark.parametrize("mu", [20.0, 25.5, 30.0, 50.0, 300.0])
@pytest.mark.parametrize("near", [0.0, 0.3, 2.0])
def test_delta_where_the_exponential_would_overflow(mu, near):
    """φ(near)·Φ(-far)/φ(far) by scipy's scaled error function, which knows no series."""
    far = near + mu
    expected = norm.sf(near) - norm.pdf(near) * math.sqrt(math.pi / 2) * erfcx(far / math.sqrt(2))
    assert gaussian_delta((near + mu / 2) * mu, mu) == pytest.approx(expected, rel=3e-8)


def test_epsilon_is_found_to_the_last_digits():
    for mu in (0.01, 0.3, 4.0):
        epsilon = gaussian_epsilon(1e-5, mu)
        assert gaussian_delta(epsilon * (1 + 1e-10), mu) < 1e-5 < gaussian_delta(epsilon * (1 - 1e-10), mu)


def test_with_hardly_any_noise_the_central_limit_stays_finite():
    assert math.isfinite(central_limit_mu(0.02, 0.01, 10))
    assert central_limit_mu(0.1, 0.01, 9) == pytest.approx(0.03 * math.sqrt(math.expm1(100.0)))


def test_one_example_is_enough_data():
    assert PoissonSampler(1, 1.0, 0).indices(0).tolist() == [0]
    assert ShuffleSampler(1, 1, 0).indices(3).tolist() == [0]
    plan = make_plan(dataset_size=1, expected_batch_size=1, steps=1, delta=0.1, noise_multiplier=1.0, accountant="rdp")
    assert plan.sample_rate == 1.0


def test_whole_numbers_may_be_written_as_floats():
    plan = make_plan(
        dataset_size=100.0, expected_batch_size=10.0, steps=5.0, delta=1e-5, noise_multiplier=1.0, accountant="rdp"
    )
    assert plan.spent(5.0).executed_steps == 5 and isinstance(plan.spent(5.0).executed_steps, int)
    assert ShuffleSampler(10, 5.0, 0).indices(1.0).dtype == "int64"


def test_no_groups_elsewhere_is_the_default_and_takes_any_allocation():
    for allocation in ("global", "equal_budget", "weighted"):
        here = noise_stds([1.0, 2.0], [1, 4], 0.5, allocation)
        assert torch.equal(here, noise_stds([1.0, 2.0], [1, 4], 0.5, allocation, groups_elsewhere=0))


def test_the_usual_accountant_is_prv():
    setting = (1.0, 1e-5, 0.1, 10)
    assert calibrate(*setting).noise_multiplier == calibrate(*setting, "prv").noise_multiplier
