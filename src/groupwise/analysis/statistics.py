"""Means over seeds with their intervals, and tests of paired differences."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

CONFIDENCE = 0.95


class Summary(NamedTuple):
    """Some numbers in short; `std` (n - 1 in the denominator) and the t-interval are NaN for fewer than two."""

    mean: float
    n: int
    std: float
    low: float
    high: float


def summarise(values: Sequence[float]) -> Summary:
    """Mean, standard deviation and 95 % t-interval of the mean; NaN of nothing."""
    numbers = np.asarray(values, dtype=float)
    n = len(numbers)
    mean = float(numbers.mean()) if n else math.nan
    if n < 2:
        return Summary(mean, n, math.nan, math.nan, math.nan)
    std = float(numbers.std(ddof=1))
    half = quantile(n - 1) * std / math.sqrt(n)
    return Summary(mean, n, std, mean - half, mean + half)


def quantile(degrees: int) -> float:
    """Of the t-distribution, so that 95 % lie within plus and minus it."""
    from scipy.stats import t

    return float(t.ppf((1 + CONFIDENCE) / 2, degrees))


def p_of_no_difference(differences: Sequence[float]) -> float:
    """Two-sided p of the paired t-test that the mean of `differences` is zero; NaN where they do not vary."""
    from scipy.stats import ttest_1samp

    numbers = np.asarray(differences, dtype=float)
    if len(numbers) < 2 or np.ptp(numbers) == 0:
        return math.nan
    return float(ttest_1samp(numbers, 0.0).pvalue)
