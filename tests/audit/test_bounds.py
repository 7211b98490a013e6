"""Lower bounds on ε against mechanisms whose ε is known: never above it more often than said, and not idle either."""

import math

import numpy as np
import pytest
from scipy.special import expit
from scipy.stats import binom

from groupwise.audit import bounds
from groupwise.audit.bounds import one_run_epsilon, two_worlds_epsilon
from groupwise.privacy.accountants import gaussian_epsilon

DELTA, CONFIDENCE = 1e-5, 0.95


def few(wrong: int, tries: int) -> bool:
    """Whether so many bounds above the truth are no more than 1 - CONFIDENCE explains."""
    return bool(binom.sf(wrong - 1, tries, 1 - CONFIDENCE) > 1e-3)


def played(mu: float, canaries: int, guesses: int, random: np.random.Generator) -> int:
    """Right guesses against a Gaussian release: half of them "in" at the top, half "out" at the bottom."""
    present = random.integers(0, 2, canaries)
    order = np.argsort(mu * present + random.standard_normal(canaries))
    half = guesses // 2
    return int(present[order[-half:]].sum() + (1 - present[order[:half]]).sum())


def two_gaussians(mu: float, runs: int, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    return random.standard_normal(runs), mu + random.standard_normal(runs)


def responses(epsilon: float, runs: int, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Randomized response: the mechanism that reaches its ε, with δ = 0."""
    right = expit(epsilon)
    return (random.random(runs) > right).astype(float), (random.random(runs) < right).astype(float)


# -- one run ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("epsilon", [0.1, 1.0, 4.0])
def test_randomized_response_is_refuted_as_seldom_as_said(epsilon):
    guesses = 200
    wins = binom.pmf(np.arange(guesses + 1), guesses, expit(epsilon))
    said = np.array([one_run_epsilon(v, guesses, guesses, 0.0, CONFIDENCE) for v in range(guesses + 1)])
    assert 0.2 * (1 - CONFIDENCE) < wins[said > epsilon].sum() <= 1 - CONFIDENCE
    planted = np.append(said[3:], [said[-1]] * 3)  # three guesses too many counted as right
    assert wins[planted > epsilon].sum() > 1 - CONFIDENCE


def test_delta_is_paid_for_as_in_theorem_5_2():
    correct, guesses, canaries, delta, epsilon = 180, 200, 1000, 1e-4, 1.7
    tail = [binom.sf(correct - i - 1, guesses, expit(epsilon)) for i in range(correct + 1)]
    slack = max((tail[i] - tail[0]) / i for i in range(1, correct + 1))
    level = tail[0] + 2 * canaries * delta * slack
    assert one_run_epsilon(correct, guesses, canaries, delta, 1 - level) == pytest.approx(epsilon, abs=2e-4)


def test_a_mechanism_that_tells_all_with_probability_delta_is_within_delta():
    canaries, delta = 10, 0.1  # (0, 0.1)-DP; all guesses are right more often than 5 %
    assert one_run_epsilon(canaries, canaries, canaries, delta, CONFIDENCE) == 0.0
    assert one_run_epsilon(canaries, canaries, canaries, 0.0, CONFIDENCE) > 1.0


@pytest.mark.parametrize(("epsilon", "guesses"), [(1.0, 60), (8.0, 60), (3.0, 300)])
def test_a_gaussian_release_is_not_refuted(epsilon, guesses):
    random, mu = np.random.default_rng(0), mu_of(epsilon)
    games, canaries = 300, 600
    right = [played(mu, canaries, guesses, random) for _ in range(games)]
    plain = {v: one_run_epsilon(v, guesses, canaries, DELTA, CONFIDENCE) for v in set(right)}
    assert few(sum(plain[v] > epsilon for v in right), games)
    assert np.mean([plain[v] for v in right]) > 0.05 * epsilon


@pytest.mark.parametrize("asked", [(3, 2, 5), (-1, 2, 5), (1, 6, 5), (0, 0, 5)])
def test_impossible_counts_are_refused(asked):
    with pytest.raises(ValueError, match="correct is"):
        one_run_epsilon(*asked, DELTA)


# -- two worlds ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("epsilon", [0.3, 1.0, 4.0])
def test_two_gaussians_are_bounded_by_their_epsilon(epsilon):
    random, mu, tries = np.random.default_rng(0), mu_of(epsilon), 200
    worlds = [two_gaussians(mu, 400, random) for _ in range(tries)]
    plain = [two_worlds_epsilon(*scores, DELTA, CONFIDENCE) for scores in worlds]
    assert few(sum(np.array(plain) > epsilon), tries)
    if epsilon == 4.0:
        assert np.mean(plain) > 0.1 * epsilon


def test_two_worlds_reach_the_epsilon_of_randomized_response():
    random, tries = np.random.default_rng(0), 200
    said = [two_worlds_epsilon(*responses(2.0, 2000, random), 0.0, CONFIDENCE) for _ in range(tries)]
    assert few(sum(np.array(said) > 2.0), tries)
    assert np.mean(said) > 1.5


def test_rates_without_confidence_would_be_caught(monkeypatch):
    bounded = bounds._clopper_pearson
    monkeypatch.setattr(bounds, "_clopper_pearson", lambda out, inside, t, _: bounded(out, inside, t, 0.5))
    random, tries = np.random.default_rng(0), 100
    said = [two_worlds_epsilon(*responses(2.0, 2000, random), 0.0, CONFIDENCE) for _ in range(tries)]
    assert not few(sum(np.array(said) > 2.0), tries)


def test_a_threshold_chosen_on_the_runs_that_judge_it_would_be_caught():
    random, tries = np.random.default_rng(0), 200
    worlds = [two_gaussians(0.0, 100, random) for _ in range(tries)]
    honest = sum(two_worlds_epsilon(*scores, 0.0) > 0 for scores in worlds)
    doubled = [[np.repeat(scores[::2], 2) for scores in world] for world in worlds]  # both halves are the same runs
    assert honest <= 2 < 6 <= sum(two_worlds_epsilon(*scores, 0.0) > 0 for scores in doubled)


def test_the_error_that_is_rarer_counts():
    """A score that never lies about "in" proves as much as one that never lies about "out"."""
    zeros, ones = np.zeros(2000), np.concatenate([np.ones(1000), np.zeros(1000)])
    mixed = np.random.default_rng(0).permutation(ones)
    one_way, other_way = two_worlds_epsilon(zeros, mixed, 0.0), two_worlds_epsilon(mixed, np.ones(2000), 0.0)
    assert one_way == pytest.approx(other_way, rel=0.1) and one_way > 4


def test_delta_is_taken_off():
    """A mechanism that tells with probability δ, and else says nothing."""
    told = np.where(np.random.default_rng(0).random(4000) < 0.1, 1.0, 0.0)
    assert two_worlds_epsilon(np.zeros(4000), told, 0.1) == 0.0
    assert two_worlds_epsilon(np.zeros(4000), told, 0.0) > 1.0


@pytest.mark.parametrize("scores", [[1.0], [1.0, math.nan], []])
def test_scores_that_say_nothing_are_refused(scores):
    with pytest.raises(ValueError, match="two scores"):
        two_worlds_epsilon(scores, [0.0, 1.0], DELTA)


def mu_of(epsilon: float) -> float:
    """The μ whose ε at DELTA is this."""
    low, high = 0.0, 10.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if gaussian_epsilon(DELTA, middle) < epsilon else (low, middle)
    return low
