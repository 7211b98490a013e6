"""Every allocation spends the same budget: Σ_k (C_k/std_k)² = 1/σ_new²."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from groupwise.errors import UserError
from groupwise.privacy.calibration import split_noise
from groupwise.privacy.mechanism import ALLOCATIONS, noise_stds

groups = st.lists(st.tuples(st.floats(1e-5, 1e3), st.integers(1, 10**7)), min_size=1, max_size=40)
sigmas = st.floats(0.1, 100.0)


def spends_the_budget(thresholds, stds, sigma) -> bool:
    """Whether all groups together cost as much as one Gaussian release at σ."""
    cost = float((torch.as_tensor(thresholds, dtype=torch.float64) / torch.as_tensor(stds)).square().sum())
    return math.isclose(cost, sigma**-2, rel_tol=1e-9)


@pytest.mark.parametrize("allocation", ALLOCATIONS)
@given(groups=groups, sigma=sigmas)
def test_all_allocations_cost_one_release_at_sigma(allocation, groups, sigma):
    thresholds, sizes = zip(*groups, strict=True)
    assert spends_the_budget(thresholds, noise_stds(thresholds, sizes, sigma, allocation), sigma)


stages = st.lists(st.lists(st.tuples(st.floats(1e-5, 1e3), st.integers(1, 10**7)), min_size=1, max_size=5), max_size=8)


@given(first=groups, others=stages, sigma=sigmas)
def test_stages_of_one_and_of_several_groups_cost_one_release_at_sigma_together(first, others, sigma):
    """Each stage knows its own thresholds, and only the number of groups of the others."""
    pipeline = [first, *others]
    total = sum(len(stage) for stage in pipeline)
    stds, alone = [], []
    for stage in pipeline:
        own, sizes = zip(*stage, strict=True)
        stds.append(noise_stds(own, sizes, sigma, "equal_budget", groups_elsewhere=total - len(own)))
        alone.append(noise_stds(own, sizes, sigma, "equal_budget"))
    thresholds = torch.tensor([c for stage in pipeline for c, _ in stage], dtype=torch.float64)
    assert spends_the_budget(thresholds, torch.cat(stds), sigma)
    assert spends_the_budget(thresholds, torch.cat(alone), sigma) == (len(pipeline) == 1)
    assert spends_the_budget(thresholds, sigma * thresholds, sigma) == (total == 1)  # planted bug: without √K


@pytest.mark.parametrize("allocation", ["global", "weighted"])
def test_other_allocations_need_the_thresholds_of_the_other_devices(allocation):
    with pytest.raises(UserError, match=r"thresholds of the other devices.*noise\.allocation=equal_budget"):
        noise_stds([1.0], [1], 1.0, allocation, groups_elsewhere=1)


def test_the_checker_catches_noise_for_other_thresholds_than_those_that_clipped():
    before, after = [1.0, 2.0], [1.0, 2.5]
    assert not spends_the_budget(after, noise_stds(before, [3, 4], 1.0, "equal_budget"), 1.0)


@given(sigma=st.floats(0.01, 1e4), groups=st.integers(1, 10_000), share=st.floats(1e-6, 0.999))
def test_counts_and_gradients_together_cost_one_release_at_sigma(sigma, groups, share):
    """1/σ_new² + K/(4σ_b²) = 1/σ², of which the counts have their share."""
    count, gradient = split_noise(sigma, groups, share)
    assert 1 / gradient**2 + groups / (4 * count**2) == pytest.approx(1 / sigma**2, rel=1e-9)
    assert groups * sigma**2 / (4 * count**2) == pytest.approx(share, rel=1e-9)


@pytest.mark.parametrize(
    ("thresholds", "sizes", "sigma", "allocation", "reason"),
    [
        ([1.0], [1], 1.0, "fair", "choose one of global, equal_budget, weighted"),
        ([0.0], [1], 1.0, "global", "above 0"),
        ([-1.0], [1], 1.0, "global", "above 0"),
        ([math.nan], [1], 1.0, "global", "above 0"),
        ([math.inf], [1], 1.0, "global", "finite"),
        ([], [], 1.0, "global", "one for each group"),
        ([[1.0]], [1], 1.0, "global", "flat list"),
        ([1.0], [0], 1.0, "weighted", "sizes"),
        ([1.0], [1], -1.0, "global", "noise_multiplier"),
        ([1.0], [1], math.nan, "global", "noise_multiplier"),
        ([1.0], [1], math.inf, "global", "noise_multiplier"),
    ],
)
def test_invalid_arguments_are_refused(thresholds, sizes, sigma, allocation, reason):
    with pytest.raises(UserError, match=reason):
        noise_stds(thresholds, sizes, sigma, allocation)
