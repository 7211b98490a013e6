"""Lower confidence bounds on ε from guesses about the data; uses only numpy and scipy.

There are two games. **One run**: each of m canaries is in the data with probability ½, independently. The auditor sees
the output of one run and makes exactly r guesses "in" or "out" about canaries of its choice. **Two worlds**: many runs
on each of two neighbouring datasets, with one score per run.

Formal guarantee: for a mechanism that is (ε, δ)-DP for adding or removing one example, the bound exceeds ε with
probability at most 1 - `CONFIDENCE`. The number r of guesses must be fixed in advance (one run), and the scores must
be independent (two worlds).
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import expit
from scipy.stats import beta, binom

CONFIDENCE = 0.95
LARGEST_EPSILON = 60.0


def one_run_epsilon(correct: int, guesses: int, canaries: int, delta: float) -> float:
    """Return the largest ε that ``correct`` right guesses refute, rounded down to 1e-4, or 0 (Steinke et al. 2023,
    Theorem 5.2).

    Under (ε, δ)-DP the number of right guesses W has, with F the tail of Binomial(r, 1/(1 + e^-ε)),
    P[W ≥ v] ≤ F(v) + 2mδ · max_i (F(v - i) - F(v))/i.
    """
    if not 0 <= correct <= guesses <= canaries or not guesses:
        raise ValueError(f"correct is {correct} of {guesses}; give 0 <= correct <= guesses <= {canaries}, and a guess.")

    def refuted(epsilon: float) -> bool:
        right = float(expit(epsilon))
        below = np.cumsum(binom.pmf(np.arange(correct - 1, -1, -1), guesses, right)) / np.arange(1, correct + 1)
        slack = 2.0 * canaries * delta * float(below.max(initial=0.0))
        return bool(binom.sf(correct - 1, guesses, right) + slack < 1.0 - CONFIDENCE)

    if not refuted(0.0):
        return 0.0
    low, high = 0.0, LARGEST_EPSILON
    while high - low > 1e-4:  # all smaller values are refuted too
        middle = 0.5 * (low + high)
        low, high = (middle, high) if refuted(middle) else (low, middle)
    return low


def two_worlds_epsilon(scores_out: ArrayLike, scores_in: ArrayLike, delta: float) -> float:
    """Return a lower bound on ε from scores of runs without (``scores_out``) and with (``scores_in``) one example.

    "In" is guessed above a threshold. The even-numbered runs choose the threshold, and the odd-numbered runs bound both
    error rates (Clopper-Pearson, each with half of 1 - `CONFIDENCE`). Under (ε, δ)-DP, FPR·e^ε + FNR ≥ 1 - δ, and the
    same with the two exchanged. Raises ValueError for NaN, or fewer than two scores in a world.
    """
    out, inside = (np.asarray(scores, dtype=np.float64).ravel() for scores in (scores_out, scores_in))
    if min(len(out), len(inside)) < 2 or np.isnan(out).any() or np.isnan(inside).any():
        raise ValueError("give at least two scores for each world, none of them NaN.")
    alpha = (1.0 - CONFIDENCE) / 2.0
    thresholds = np.unique(np.concatenate([out[::2], inside[::2]]))
    false_in, false_out = _clopper_pearson(out[::2], inside[::2], thresholds, alpha)
    best = thresholds[int(np.argmax(_epsilon_of_errors(false_in, false_out, delta)))]
    false_in, false_out = _clopper_pearson(out[1::2], inside[1::2], np.array([best]), alpha)
    return float(_epsilon_of_errors(false_in, false_out, delta)[0])


def _clopper_pearson(
    out: NDArray[np.float64], inside: NDArray[np.float64], thresholds: NDArray[np.float64], alpha: float
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return upper bounds on P[out > t] and P[in ≤ t] for each t, each wrong with probability at most ``alpha``."""
    false_in = len(out) - np.searchsorted(np.sort(out), thresholds, side="right")
    false_out = np.searchsorted(np.sort(inside), thresholds, side="right")
    rates = []
    for wrong, runs in ((false_in, len(out)), (false_out, len(inside))):
        rates.append(np.where(wrong < runs, beta.ppf(1.0 - alpha, wrong + 1, np.maximum(runs - wrong, 1)), 1.0))
    return rates[0], rates[1]


def _epsilon_of_errors(
    false_in: NDArray[np.float64], false_out: NDArray[np.float64], delta: float
) -> NDArray[np.float64]:
    ratio = np.maximum((1.0 - delta - false_out) / false_in, (1.0 - delta - false_in) / false_out)
    return np.log(np.maximum(ratio, 1.0))
