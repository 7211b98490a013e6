"""Cases at the edge that mutants of the mechanism have asked for."""

import torch

from groupwise.privacy.calibration import calibrate_noise_multiplier
from groupwise.privacy.mechanism import noise_stds
from groupwise.privacy.plan import make_plan
from groupwise.privacy.sampling import PoissonSampler, ShuffleSampler


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
    assert calibrate_noise_multiplier(*setting) == calibrate_noise_multiplier(*setting, "prv")
