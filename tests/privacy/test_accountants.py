"""The closed forms against an independent formula and their own inverse."""

import math

import pytest
import torch
from scipy.special import erfcx
from scipy.stats import norm

from groupwise.privacy.accountants import central_limit_mu, gaussian_epsilon
from groupwise.privacy.calibration import calibrate
from groupwise.privacy.mechanism import noise_stds
from groupwise.privacy.plan import make_plan
from groupwise.privacy.sampling import PoissonSampler, ShuffleSampler


@pytest.mark.parametrize("mu", [0.01, 0.3, 1.0, 20.0, 25.5, 50.0, 300.0])
@pytest.mark.parametrize("delta", [1e-9, 1e-5])
def test_epsilon_is_that_of_balle_and_wang(delta, mu):
    """δ(ε) = Φ(-near) - e^ε Φ(-far), with φ(near)·Φ(-far)/φ(far) for the latter: e^ε would overflow."""
    epsilon = gaussian_epsilon(delta, mu)
    near, far = epsilon / mu - mu / 2, epsilon / mu + mu / 2
    found = norm.sf(near) - norm.pdf(near) * math.sqrt(math.pi / 2) * erfcx(far / math.sqrt(2))
    assert found == pytest.approx(delta, rel=1e-6)


def test_a_large_delta_costs_nothing():
    assert gaussian_epsilon(0.5, 0.1) == gaussian_epsilon(1e-5, 0.0) == 0.0


def test_without_sampling_the_central_limit_is_exact():
    assert central_limit_mu(2.0, 1.0, 100) == 5.0
    assert central_limit_mu(2.0, 0.999999, 100) == pytest.approx(10 * math.sqrt(math.expm1(0.25)), rel=1e-5)


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
