"""Poisson samples have the distribution that accountants assume; shuffled batches cover every epoch once."""

import numpy as np
import pytest
from scipy import stats

from groupwise.privacy.noise import NoiseSource
from groupwise.privacy.sampling import PoissonSampler, ShuffleSampler
from groupwise.privacy.secure_noise import SecurePoissonSampler

STEPS = 4000


@pytest.fixture(scope="module", params=[PoissonSampler(200, 0.05, 1), SecurePoissonSampler(200, 0.05, b"k" * 32)])
def drawn(request) -> np.ndarray:
    """Which of 200 examples each of 4000 steps drew at rate 0.05, (steps, examples)."""
    sampler = request.param
    inclusion = np.zeros((STEPS, 200), dtype=bool)
    for step in range(STEPS):
        inclusion[step, sampler.indices(step)] = True
    return inclusion


def test_batch_sizes_are_binomial(drawn):
    sizes = drawn.sum(1)
    edges = np.array([-1, 4, 6, 7, 8, 9, 10, 11, 12, 14, 200])
    expected = STEPS * np.diff(stats.binom(200, 0.05).cdf(edges))
    observed = np.histogram(sizes, bins=edges + 0.5)[0]
    assert stats.chisquare(observed, expected).pvalue > 1e-3
    assert stats.chisquare(observed, np.roll(expected, 1)).pvalue < 1e-9, "the test of it can fail"


def test_every_example_is_drawn_at_the_rate(drawn):
    """Σ_i (n_i - Tρ)²/(Tρ(1-ρ)) over the examples is χ² with one degree of freedom for each."""
    statistic = ((drawn.sum(0) - STEPS * 0.05) ** 2).sum() / (STEPS * 0.05 * 0.95)
    low, high = stats.chi2(200).ppf([5e-4, 1 - 5e-4])
    assert low < statistic < high


def test_examples_are_drawn_independently_of_one_another(drawn):
    correlations = np.corrcoef(drawn.T)[np.triu_indices(200, 1)] * np.sqrt(STEPS)
    assert np.abs(correlations).max() < 6.0
    assert correlations.std() == pytest.approx(1.0, abs=0.05)


def test_steps_are_independent_of_one_another(drawn):
    for lag in (1, 2, 7):
        both = (drawn[lag:] & drawn[:-lag]).sum()
        expected = (STEPS - lag) * 200 * 0.05**2
        assert both == pytest.approx(expected, abs=5 * np.sqrt(expected))
        sizes = drawn.sum(1)
        assert abs(np.corrcoef(sizes[lag:], sizes[:-lag])[0, 1]) < 5 / np.sqrt(STEPS)


@pytest.mark.parametrize("sampler", [PoissonSampler(50, 1e-3, 0), SecurePoissonSampler(50, 1e-3, b"k" * 32)])
def test_a_batch_may_be_empty(sampler):
    batches = [sampler.indices(step) for step in range(200)]
    empty = [batch for batch in batches if len(batch) == 0]
    assert len(empty) > 150
    assert all(batch.dtype == np.int64 and batch.shape == (0,) for batch in empty)


def test_a_rate_of_one_draws_everything_and_a_negligible_one_nothing():
    for sampler in (PoissonSampler(7, 1.0, 0), SecurePoissonSampler(7, 1.0, b"k" * 32)):
        assert sampler.indices(3).tolist() == list(range(7))
    assert SecurePoissonSampler(50, 1e-20, b"k" * 32).indices(0).tolist() == []


KEYS = [NoiseSource.from_seed(seed).derive("sampling") for seed in (0, 1)]


@pytest.mark.parametrize(
    ("make", "seeds"),
    [
        (lambda s: PoissonSampler(300, 0.1, s), (5, 6, *KEYS)),
        (lambda s: ShuffleSampler(300, 30, s), (5, 6, *KEYS)),
        (lambda s: SecurePoissonSampler(300, 0.1, s), KEYS),
    ],
)
def test_a_batch_is_a_pure_function_of_seed_and_step(make, seeds):
    for seed in seeds:
        forward = [make(seed).indices(step) for step in range(40)]
        sampler = make(seed)
        backward = [sampler.indices(step) for step in reversed(range(40))][::-1]
        assert all(np.array_equal(a, b) for a, b in zip(forward, backward, strict=True))
        assert all(batch.dtype == np.int64 and np.all(np.diff(batch) > 0) for batch in forward)
    assert not np.array_equal(make(seeds[0]).indices(0), make(seeds[1]).indices(0))
    assert not np.array_equal(make(seeds[0]).indices(0), make(seeds[0]).indices(1))


@pytest.mark.parametrize("batch_size", [1, 7, 10, 23])
def test_shuffling_covers_each_epoch_exactly_once(batch_size):
    sampler = ShuffleSampler(23, batch_size, seed=0)
    assert sampler.steps_per_epoch == -(-23 // batch_size)
    orders = []
    for epoch in range(3):
        steps = range(epoch * sampler.steps_per_epoch, (epoch + 1) * sampler.steps_per_epoch)
        batches = [sampler.indices(step) for step in steps]
        assert sorted(np.concatenate(batches).tolist()) == list(range(23))
        assert all(len(batch) == batch_size for batch in batches[:-1])
        orders.append([batch.tolist() for batch in batches])
    if batch_size < 23:
        assert orders[0] != orders[1] != orders[2]


def test_batches_match_known_answers():
    key = NoiseSource.from_seed(7).derive("sampling")
    assert PoissonSampler(40, 0.2, 3).indices(1).tolist() == [15, 20, 22, 24]
    assert PoissonSampler(40, 0.2, key).indices(7).tolist() == [14, 16, 19, 22, 27, 28, 33, 36, 39]
    assert ShuffleSampler(20, 5, 3).indices(1).tolist() == [1, 4, 6, 9, 13]
    assert SecurePoissonSampler(40, 0.2, b"k" * 32).indices(7).tolist() == [8, 16, 24, 27, 29, 35, 38]
    assert ShuffleSampler(20, 5, b"k" * 32).indices(6).tolist() == [1, 8, 12, 14, 16]
