"""How many guesses to make, settled before the run from the plan alone, and the guesses."""

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from groupwise.audit.evidence import Evidence, log_ratio
from groupwise.privacy.audit.bounds import one_run_epsilon

_REHEARSALS = 12
_FRACTIONS = (0.01, 0.02, 0.03, 0.05, 0.08, 0.12, 0.2, 0.3, 0.5)


@lru_cache
def choose_guesses(
    power: float, sample_rate: float, steps: int, canaries: int, delta: float, confidence: float
) -> tuple[int, int]:
    """(guesses of "in", guesses of "out") that promise the largest bound, by rehearsal with the noise as claimed.

    Args:
        power: a = Σ_k ‖own‖²/std_k² of one canary in one step; the other arguments are the plan's.
    """
    random = np.random.default_rng(0)
    rehearsed = []
    for _ in range(_REHEARSALS):
        present = random.integers(0, 2, canaries).astype(bool)
        scores = np.zeros(canaries)
        for _ in range(steps):
            drawn = present & (random.random(canaries) < sample_rate)
            found = drawn * power + np.sqrt(power) * random.standard_normal(canaries)
            scores += log_ratio(Evidence(found, np.full(canaries, power)), sample_rate)
        rehearsed.append((scores, present))
    best = (-1.0, (1, 1))
    for fraction in _FRACTIONS:
        for share_out in (0.5, 0.0):
            guesses = max(4, round(fraction * canaries))
            out = round(share_out * guesses)
            right = [count_right(scores, present, guesses - out, out) for scores, present in rehearsed]
            promised = one_run_epsilon(int(np.mean(right)), guesses, canaries, delta, confidence)
            best = max(best, (promised, (guesses - out, out)))
    return best[1]


def count_right(scores: NDArray[np.float64], present: NDArray[np.bool_], inside: int, out: int) -> int:
    """How many are right if the ``inside`` highest scores are called in, and the ``out`` lowest out."""
    order = np.argsort(scores, kind="stable")
    return int(present[order[len(order) - inside :]].sum() + (~present[order[:out]]).sum())
