"""Compares means over seeds, with intervals and paired differences."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from groupwise.analysis.paper import settings_of

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


Settings = Mapping[str, str]


@dataclass(frozen=True)
class Contrast:
    """A difference of `metric` between cells of one sweep.

    Attributes:
        sweep: whose cells.
        plus: settings of the cells that count positively, such as {"clip": "flat"}; several are added up.
        minus: settings of those that are subtracted.
        where: settings that all of them have.
        metric: the column of measured rows.
    """

    sweep: str
    plus: tuple[Settings, ...]
    minus: tuple[Settings, ...]
    where: Settings = field(default_factory=dict)
    metric: str = "valid/accuracy"

    @property
    def terms(self) -> tuple[tuple[int, Settings], ...]:
        return (*((1, settings) for settings in self.plus), *((-1, settings) for settings in self.minus))

    def uses(self, cell: str) -> bool:
        """Is that cell one of its own?"""
        found = settings_of(cell).items()
        return self.where.items() <= found and any(settings.items() <= found for _, settings in self.terms)


class Differences(NamedTuple):
    """What a contrast comes to: a difference for each pair, and what is behind them."""

    differences: list[float]
    unpaired: int
    """Places (other settings and seed) at which some of the cells have a value and others none."""
    means: list[float]
    """Of each term, over the pairs."""


def differences(contrast: Contrast, values: Mapping[tuple[str, int], float]) -> Differences:
    """The contrast at each place where all of its cells have a value; `values` is by cell and seed.

    A place is a seed with all settings but those that the contrast varies. Sorted by place, so the order of `values`
    does not matter.
    """
    varied = {key for _, settings in contrast.terms for key in settings}
    places: dict[tuple[tuple[tuple[str, str], ...], int], dict[int, float]] = {}
    for (cell, seed), value in values.items():
        found = settings_of(cell)
        if not contrast.where.items() <= found.items():
            continue
        rest = tuple(sorted((key, text) for key, text in found.items() if key not in varied))
        for number, (_, settings) in enumerate(contrast.terms):
            if settings.items() <= found.items():
                places.setdefault((rest, seed), {})[number] = value
    whole = [places[at] for at in sorted(places) if len(places[at]) == len(contrast.terms)]
    signs = [sign for sign, _ in contrast.terms]
    return Differences(
        [sum(sign * at[number] for number, sign in enumerate(signs)) for at in whole],
        len(places) - len(whole),
        [sum(at[number] for at in whole) / len(whole) for number in range(len(signs))] if whole else [],
    )
