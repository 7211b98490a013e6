"""Lower bounds on ε of mechanisms with known ε exceed it no more often than 5 %, and are not trivial."""

import math

import numpy as np
import pytest
from scipy.optimize import brentq
from scipy.special import expit
from scipy.stats import binom

from groupwise.audit import bounds
from groupwise.audit.bounds import one_run_epsilon, two_worlds_epsilon
from groupwise.privacy.accountants import gaussian_epsilon

DELTA, CONFIDENCE = 1e-5, 0.95


def is_few(wrong: int, tries: int) -> bool:
    """Whether 1 - CONFIDENCE explains this number of bounds above the truth."""
    return bool(binom.sf(wrong - 1, tries, 1 - CONFIDENCE) > 1e-3)


def played(mu: float, canaries: int, guesses: int, random: np.random.Generator) -> int:
    """The number of right guesses on a Gaussian release: "in" for the highest scores, "out" for the lowest."""
    present = random.integers(0, 2, canaries)
    order = np.argsort(mu * present + random.standard_normal(canaries))
    half = guesses // 2
    return int(present[order[-half:]].sum() + (1 - present[order[:half]]).sum())


def two_gaussians(mu: float, runs: int, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    return random.standard_normal(runs), mu + random.standard_normal(runs)


def responses(epsilon: float, runs: int, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Randomized response, which reaches its ε with δ = 0."""
    right = expit(epsilon)
    return (random.random(runs) > right).astype(float), (random.random(runs) < right).astype(float)


@pytest.mark.parametrize("epsilon", [0.1, 1.0, 4.0])
def test_bounds_of_randomized_response_have_their_confidence(epsilon):
    guesses = 200
    wins = binom.pmf(np.arange(guesses + 1), guesses, expit(epsilon))
    found_bounds = np.array([one_run_epsilon(v, guesses, guesses, 0.0) for v in range(guesses + 1)])
    assert 0.2 * (1 - CONFIDENCE) < wins[found_bounds > epsilon].sum() <= 1 - CONFIDENCE
    planted = np.append(found_bounds[3:], [found_bounds[-1]] * 3)  # counts three guesses too many as right
    assert wins[planted > epsilon].sum() > 1 - CONFIDENCE


def test_delta_is_accounted_as_in_theorem_5_2(monkeypatch):
    correct, guesses, canaries, delta, epsilon = 180, 200, 1000, 1e-4, 1.7
    tail = [binom.sf(correct - i - 1, guesses, expit(epsilon)) for i in range(correct + 1)]
    slack = max((tail[i] - tail[0]) / i for i in range(1, correct + 1))
    level = tail[0] + 2 * canaries * delta * slack
    monkeypatch.setattr(bounds, "CONFIDENCE", 1 - level)
    assert one_run_epsilon(correct, guesses, canaries, delta) == pytest.approx(epsilon, abs=2e-4)


def test_full_disclosure_with_probability_delta_is_within_delta():
    canaries, delta = 10, 0.1  # (0, 0.1)-DP; all guesses are right more often than 5 %
    assert one_run_epsilon(canaries, canaries, canaries, delta) == 0.0
    assert one_run_epsilon(canaries, canaries, canaries, 0.0) > 1.0


@pytest.mark.parametrize(("epsilon", "guesses"), [(1.0, 60), (8.0, 60), (3.0, 300)])
def test_bounds_of_a_gaussian_release_stay_below_its_epsilon(epsilon, guesses):
    random, mu = np.random.default_rng(0), mu_of(epsilon)
    games, canaries = 300, 600
    right = [played(mu, canaries, guesses, random) for _ in range(games)]
    plain = {v: one_run_epsilon(v, guesses, canaries, DELTA) for v in set(right)}
    assert is_few(sum(plain[v] > epsilon for v in right), games)
    assert np.mean([plain[v] for v in right]) > 0.05 * epsilon


@pytest.mark.parametrize("counts", [(3, 2, 5), (-1, 2, 5), (1, 6, 5), (0, 0, 5)])
def test_impossible_counts_are_refused(counts):
    with pytest.raises(ValueError, match="correct is"):
        one_run_epsilon(*counts, DELTA)


@pytest.mark.parametrize("epsilon", [0.3, 1.0, 4.0])
def test_bounds_of_two_gaussians_stay_below_their_epsilon(epsilon):
    random, mu, tries = np.random.default_rng(0), mu_of(epsilon), 200
    worlds = [two_gaussians(mu, 400, random) for _ in range(tries)]
    plain = [two_worlds_epsilon(*scores, DELTA) for scores in worlds]
    assert is_few(sum(np.array(plain) > epsilon), tries)
    if epsilon == 4.0:
        assert np.mean(plain) > 0.1 * epsilon


def test_two_worlds_bounds_approach_randomized_response():
    random, tries = np.random.default_rng(0), 200
    found_bounds = [two_worlds_epsilon(*responses(2.0, 2000, random), 0.0) for _ in range(tries)]
    assert is_few(sum(np.array(found_bounds) > 2.0), tries)
    assert np.mean(found_bounds) > 1.5


def test_rates_without_confidence_intervals_are_detected(monkeypatch):
    bounded = bounds._clopper_pearson
    monkeypatch.setattr(bounds, "_clopper_pearson", lambda out, inside, t, _: bounded(out, inside, t, 0.5))
    random, tries = np.random.default_rng(0), 100
    found_bounds = [two_worlds_epsilon(*responses(2.0, 2000, random), 0.0) for _ in range(tries)]
    assert not is_few(sum(np.array(found_bounds) > 2.0), tries)


def test_threshold_chosen_on_the_evaluated_runs_is_detected():
    random, tries = np.random.default_rng(0), 200
    worlds = [two_gaussians(0.0, 100, random) for _ in range(tries)]
    honest = sum(two_worlds_epsilon(*scores, 0.0) > 0 for scores in worlds)
    doubled = [[np.repeat(scores[::2], 2) for scores in world] for world in worlds]  # both halves have the same runs
    assert honest <= 2 < 6 <= sum(two_worlds_epsilon(*scores, 0.0) > 0 for scores in doubled)


def test_bound_uses_the_rarer_error():
    """A score that is never wrong about "in" gives the same bound as one that is never wrong about "out"."""
    zeros, ones = np.zeros(2000), np.concatenate([np.ones(1000), np.zeros(1000)])
    mixed = np.random.default_rng(0).permutation(ones)
    one_way, other_way = two_worlds_epsilon(zeros, mixed, 0.0), two_worlds_epsilon(mixed, np.ones(2000), 0.0)
    assert one_way == pytest.approx(other_way, rel=0.1) and one_way > 4


def test_delta_is_subtracted():
    """A mechanism that reveals the example with probability δ, and otherwise nothing."""
    revealed = np.where(np.random.default_rng(0).random(4000) < 0.1, 1.0, 0.0)
    assert two_worlds_epsilon(np.zeros(4000), revealed, 0.1) == 0.0
    assert two_worlds_epsilon(np.zeros(4000), revealed, 0.0) > 1.0


@pytest.mark.parametrize("scores", [[1.0], [1.0, math.nan], []])
def test_invalid_scores_are_refused(scores):
    with pytest.raises(ValueError, match="two scores"):
        two_worlds_epsilon(scores, [0.0, 1.0], DELTA)


def mu_of(epsilon: float) -> float:
    """The μ of a Gaussian release with this ε at DELTA."""
    return float(brentq(lambda mu: gaussian_epsilon(DELTA, mu) - epsilon, 0.01, 10.0))
