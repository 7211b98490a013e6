"""Adaptive thresholds: the sensitivity of their counts, where they converge, and each step's update."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from groupwise.errors import UserError
from groupwise.privacy.noise import COUNT_STREAM, NoiseSource
from groupwise.privacy.thresholds import AdaptiveThresholds, FixedThresholds, centred_counts


def make(initial=(1.0, 2.0), quantile=0.5, rate=0.3, sigma_b=0.0, batch=100.0, **options) -> AdaptiveThresholds:
    return AdaptiveThresholds(initial, quantile, rate, sigma_b, batch, **options)


batches = st.integers(1, 30).flatmap(
    lambda groups: st.lists(st.lists(st.booleans(), min_size=groups, max_size=groups), min_size=1, max_size=30)
)


def distance_between_neighbours(release, bits: np.ndarray) -> float:
    """How far the release moves, at most, when one example is left out."""
    whole = release(torch.as_tensor(bits.sum(0)), len(bits))
    without = [np.delete(bits, i, axis=0) for i in range(len(bits))]
    return max(float((whole - release(torch.as_tensor(b.sum(0)), len(b))).norm()) for b in without)


@given(batches)
def test_neighbours_differ_by_exactly_half_the_root_of_k(batch):
    bits = np.array(batch, dtype=np.int64)
    assert distance_between_neighbours(centred_counts, bits) == pytest.approx(0.5 * math.sqrt(bits.shape[1]))


def test_the_checker_catches_counts_that_are_not_centred():
    bits = np.ones((5, 9), dtype=np.int64)
    planted = distance_between_neighbours(lambda counts, examples: counts.double(), bits)
    assert planted == pytest.approx(3.0)
    assert planted > 0.5 * math.sqrt(9)


def test_the_checker_catches_counts_divided_by_the_drawn_size():
    bits = np.array([[1], [0]])
    assert distance_between_neighbours(lambda counts, examples: counts.double() / examples * 100, bits) > 0.5


def follow(norms: np.ndarray, batch: int, sigma_b: float, steps: int, quantile: float) -> np.ndarray:
    """The thresholds after each step, on Poisson samples of the given per-example norms, (steps, K)."""
    rng = np.random.default_rng(0)
    thresholds = make([50.0, 0.001], quantile, 0.3, sigma_b, batch)
    path = []
    for step in range(steps):
        drawn = norms[rng.random(len(norms)) < batch / len(norms)]
        counts = (drawn[:, None] * np.array([1.0, 4.0]) <= thresholds.count_thresholds.numpy()).sum(0)
        thresholds.update(torch.as_tensor(counts), len(drawn), NoiseSource.from_seed(1), step)
        path.append(thresholds.clip_thresholds.numpy())
    return np.array(path)


@pytest.mark.parametrize("quantile", [0.3, 0.5, 0.85])
@pytest.mark.parametrize("sigma_b", [0.0, 10.0])
def test_thresholds_converge_to_the_target_quantile(quantile, sigma_b):
    norms = np.random.default_rng(1).lognormal(0.0, 1.0, 5000)
    settled = follow(norms, 200, sigma_b, 600, quantile)[300:].mean(0)
    below = [(norms <= settled[0]).mean(), (4 * norms <= settled[1]).mean()]
    assert below == pytest.approx([quantile, quantile], abs=0.03)


def test_thresholds_stay_between_the_bounds():
    thresholds = make(rate=100.0, minimum=0.5, maximum=3.0)
    thresholds.update(torch.tensor([0, 100]), 100, None, 0)
    assert thresholds.clip_thresholds.tolist() == [3.0, 0.5]
    assert make([1e-3, 9.0], minimum=0.5, maximum=3.0).clip_thresholds.tolist() == [0.5, 3.0]


def test_huge_noise_leaves_finite_thresholds():
    thresholds = make(sigma_b=1e9)
    for step in range(20):
        thresholds.update(torch.zeros(2), 0, NoiseSource.from_seed(0), step)
        assert bool(thresholds.clip_thresholds.isfinite().all())
        assert bool((thresholds.clip_thresholds > 0).all())


@given(st.lists(st.floats(1e-8, 1e8), min_size=1, max_size=50), st.floats(1e-4, 1e4))
def test_rescaling_gives_exactly_the_total_norm(initial, total):
    assert make(initial, rescale_to=total).clip_thresholds.norm().item() == pytest.approx(total, rel=1e-12)


def test_thresholds_cannot_be_changed_from_outside():
    for thresholds in (make(), FixedThresholds([1.0, 2.0])):
        thresholds.clip_thresholds.zero_()
        thresholds.count_thresholds.zero_()
        thresholds.state_dict()["thresholds"].zero_()
        assert thresholds.clip_thresholds.tolist() == [1.0, 2.0]


def test_fixed_thresholds_never_move():
    thresholds = FixedThresholds([1.0, 2.0])
    thresholds.update(torch.tensor([0, 9]), 9, None, 0)
    assert thresholds.clip_thresholds.tolist() == thresholds.count_thresholds.tolist() == [1.0, 2.0]
    other = FixedThresholds([3.0, 4.0])
    other.load_state_dict(thresholds.state_dict())
    assert other.clip_thresholds.tolist() == [1.0, 2.0]
    assert thresholds.clip_thresholds.dtype == torch.float64


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"initial": [0.0]}, "thresholds is"),
        ({"initial": []}, "thresholds is"),
        ({"initial": [math.nan]}, "thresholds is"),
        ({"sigma_b": -1.0}, "count_noise_multiplier"),
        ({"sigma_b": math.nan}, "count_noise_multiplier"),
    ],
)
def test_invalid_settings_are_refused(options, reason):
    with pytest.raises(UserError, match=f"^{reason} "):
        make(**options)


@pytest.mark.parametrize(
    ("counts", "examples"), [([-1, 0], 5), ([6, 0], 5), ([math.nan, 0], 5), ([0.5, 1.0], 5), ([[1, 1]], 5)]
)
def test_invalid_counts_are_refused(counts, examples):
    with pytest.raises(UserError, match="counts"):
        make().update(torch.tensor(counts), examples, None, 0)


@pytest.mark.parametrize(("sigma_b", "count", "examples"), [(0.5, 5, 10), (7.0, 60, 120), (5.0, 0, 0)])
def test_counts_are_noised_once_at_sigma_b(sigma_b, count, examples):
    """An empty batch moves the thresholds by noise alone."""
    thresholds, counts = make(sigma_b=sigma_b), torch.tensor([count, count])
    thresholds.update(counts, examples, NoiseSource.from_seed(0), 3)
    noise = NoiseSource.from_seed(0).add_gaussian_(torch.zeros(2, dtype=torch.float64), sigma_b, 3, COUNT_STREAM)
    expected = torch.tensor([1.0, 2.0], dtype=torch.float64) * torch.exp(-0.3 * noise / 100.0)
    torch.testing.assert_close(thresholds.clip_thresholds, expected, rtol=1e-12, atol=0)
