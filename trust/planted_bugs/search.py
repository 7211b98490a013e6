"""A worst case for an accounted search: runs whose score is a rare event that one example makes more likely."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from unittest.mock import patch

import numpy as np
from scipy.special import ndtri

from groupwise.privacy import PrivacyPlan, make_plan, tuning
from groupwise.privacy.tuning import RunCount, TruncatedNegativeBinomial


@contextmanager
def fixed_count_at_one_run_s_price() -> Iterator[None]:
    """As a search without accounting has it: as many runs as were planned, each at the ε that is told of the best."""
    with (
        patch.object(TruncatedNegativeBinomial, "draw", lambda self: round(self.mean)),
        patch.object(tuning, "search_curve", lambda curve, count: curve),
    ):
        yield


class RareEvent:
    """Plays of a search: each run releases whether a Gaussian sum passes `level` noises; the best one is seen.

    The noise is found at the first play, by the code as it is then, bug included.
    """

    def __init__(self, count: RunCount, sigma: Callable[[], float], level: float, sum: float, seed: int) -> None:
        self._count, self._make, self._level, self._sum = count, sigma, level, sum
        self._sigma: float | None = None
        self._random = np.random.default_rng(seed)

    def play(self) -> float:
        """1 if some run of the search passed, else 0."""
        if self._sigma is None:
            self._sigma = self._make()
        noise = self._random.standard_normal(self._count.draw())
        return float((self._sum / self._sigma + noise > self._level).any())


@dataclass(frozen=True)
class WorstSearch:
    """One full-batch Gaussian release a run.

    Args:
        runs: E[K], logarithmic. share: how often a run without the canary passes.
    """

    runs: float
    share: float

    def worlds(self, epsilon: float, delta: float, seed: int) -> tuple[RareEvent, RareEvent]:
        """The world without the canary and the one with it."""
        count = TruncatedNegativeBinomial.with_mean(0.0, self.runs)

        def sigma() -> float:
            [found] = tuning.calibrate_search([(1.0, 1)], count, epsilon, delta)
            return found

        level = float(-ndtri(self.share))
        return tuple(RareEvent(count, sigma, level, there, 2 * seed + there) for there in (0, 1))  # type: ignore[return-value]

    def plan(self, epsilon: float, delta: float) -> PrivacyPlan:
        """Of one run at the whole search's ε."""
        return make_plan(dataset_size=2, expected_batch_size=2, steps=1, delta=delta, epsilon=epsilon, accountant="pld")
