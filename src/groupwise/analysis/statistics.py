"""Summaries over seeds, tests of differences, and the status of a measured number relative to the paper's."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from scipy.stats import f, t

from groupwise.analysis.results import LEARNT, SHOWN, settings_of
from groupwise.sweeps.cells import PAPER, Sweep

CONFIDENCE = 0.95
SAME = 1e-9
"""Differences below this count as zero."""


class Summary(NamedTuple):
    """A summary of n numbers; `std` (n - 1 in the denominator) and the t-interval are NaN for n < 2."""

    mean: float
    n: int
    std: float
    low: float
    high: float


def summarise(values: Sequence[float]) -> Summary:
    """Mean, standard deviation and 95 % t-interval of the mean; the mean is NaN if there are no numbers."""
    numbers = np.asarray(values, dtype=float)
    n = len(numbers)
    mean = float(numbers.mean()) if n else math.nan
    if n < 2:
        return Summary(mean, n, math.nan, math.nan, math.nan)
    std = float(numbers.std(ddof=1))
    half = float(t.ppf((1 + CONFIDENCE) / 2, n - 1)) * std / math.sqrt(n)
    return Summary(mean, n, std, mean - half, mean + half)


def p_beyond(values: Summary, border: float, above: bool) -> float:
    """p of the one-sided t-test for a mean above (or below) `border`; NaN if the values do not vary."""
    if values.n < 2 or values.std < SAME:
        return math.nan
    distance = (values.mean - border) / (values.std / math.sqrt(values.n))
    return float(t.sf(distance if above else -distance, values.n - 1))


def p_trend(table: Sequence[Sequence[float]], levels: Sequence[float]) -> float:
    """p of the F-test for a trend of an effect over the logarithm of `levels`.

    The table has a row per level and a column per seed. Seeds are random blocks of a two-way layout without
    replication, with 1 and (L - 1)(S - 1) degrees of freedom. With two levels it tests whether the effect is the same
    at both. NaN if there is one level or one seed, or nothing varies.
    """
    cells = np.asarray(table, dtype=float)
    if min(cells.shape) < 2:
        return math.nan
    weights = np.log(levels) - np.log(levels).mean()
    rest = cells - cells.mean(0) - cells.mean(1, keepdims=True) + cells.mean()
    degrees = (cells.shape[0] - 1) * (cells.shape[1] - 1)
    residual = float((rest**2).sum()) / degrees
    trend = cells.shape[1] * float(weights @ cells.mean(1)) ** 2 / float(weights @ weights)
    if max(trend, residual) < SAME**2:
        return math.nan
    return float(f.sf(trend / max(residual, SAME**2), 1, degrees))


def holm(ps: Sequence[float]) -> list[float]:
    """p values adjusted by Holm's method, which is valid for any dependence between tests; NaN stay NaN."""
    values = np.asarray(ps, dtype=float)
    order = np.argsort(values)[: np.isfinite(values).sum()]
    adjusted = np.full(len(values), math.nan)
    adjusted[order] = np.minimum(np.maximum.accumulate(values[order] * np.arange(len(order), 0, -1)), 1.0)
    return adjusted.tolist()


Settings = Mapping[str, str]


@dataclass(frozen=True)
class Contrast:
    """A difference of `metric` between cells of one sweep.

    Attributes:
        sweep: the name of the sweep.
        plus: settings of the cells that are added, such as {"clip": "flat"}.
        minus: settings of the cells that are subtracted.
        where: settings that all of them share.
        metric: the column of the measured rows.
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
        """Whether the contrast includes that cell."""
        found = settings_of(cell).items()
        return self.where.items() <= found and any(settings.items() <= found for _, settings in self.terms)


def differences(contrast: Contrast, values: Mapping[tuple[str, int], float]) -> pd.DataFrame:
    """The pairs of a contrast for which all cells have a value, by place and seed: each term's value, and `effect`.

    A place is the sorted settings of a pair without those that the contrast varies: "privacy.epsilon=3 task=cifar".
    `values` is by cell and seed.
    """
    varied = {key for _, settings in contrast.terms for key in settings}
    found = []
    for (cell, seed), value in values.items():
        own = settings_of(cell)
        if contrast.where.items() <= own.items():
            place = " ".join(sorted(f"{key}={text}" for key, text in own.items() if key not in varied))
            of = [at for at, (_, settings) in enumerate(contrast.terms) if settings.items() <= own.items()]
            found += [(place, seed, at, value) for at in of]
    table = pd.DataFrame(found, columns=["place", "seed", "term", "value"]).astype({"value": float})
    table = table.pivot(index=["place", "seed"], columns="term", values="value")
    table = table.reindex(columns=range(len(contrast.terms))).dropna()
    return table.assign(effect=sum(sign * table[at] for at, (sign, _) in enumerate(contrast.terms)))


def places_of(pairs: pd.DataFrame) -> list[str]:
    """The places of `differences`, sorted."""
    return sorted(pairs.index.unique("place"))


def over_seeds(pairs: pd.DataFrame, places: Sequence[str]) -> list[float]:
    """The mean difference over `places`, one number for each seed that all places have.

    In a balanced design with fixed effects of places and a random effect of seeds, the t-test of these numbers is
    exact for the mean effect, whatever the variance between seeds is.
    """
    table = pairs.loc[list(places), "effect"].unstack("seed") if len(places) else pd.DataFrame()
    return table.dropna(axis=1).mean().tolist()


OBSTACLES: tuple[tuple[dict[str, str], str], ...] = (
    ({"model": "opt_175b"}, "OPT-175B: the paper's GPT-3 took 16 GPUs of 32 GB for 15 hours, and 22 to decode"),
    ({"model": "gpt2_xl"}, "GPT-2-xl (1.6 billion parameters) on a GPU"),
    ({"model": "gpt2"}, "GPT-2 on a GPU"),
    ({"model": "roberta_large"}, "RoBERTa-large on a GPU"),
    ({"model": "roberta_base"}, "RoBERTa-base on a GPU"),
    ({"task": "cifar"}, "WRN16-4 for 300 epochs on a GPU"),
)
"""Settings, and what a cell with them needs at the paper's scale; the first match counts."""
LEFT_OUT: tuple[tuple[dict[str, str], str], ...] = (
    ({"model": "roberta_large"}, "the small model replaces RoBERTa-base only"),
    ({"task": "mnli"}, "its training data were not available"),
    ({"task": "qqp"}, "its training data were not available"),
)
"""Settings, and why a smaller scale has no such cell."""


def needs(cells: Sequence[str]) -> str:
    """The hardware that the cells need at the paper's scale, in a phrase."""
    return "; ".join(dict.fromkeys(f"scale={PAPER} needs {_first(OBSTACLES, cell) or 'a GPU'}" for cell in cells))


def why_not_run(sweep: Sweep, cells: Sequence[str]) -> str:
    """Why cells have no row: the hardware that they need, and their state at smaller scales."""
    left_out = [at for at in SHOWN[1:] if at in sweep.scales]
    for at in left_out:
        if {cell.name for cell in sweep.cells(at)}.issuperset(cells):
            return f"{needs(cells)}; scale={at} was not run yet"
    reasons = dict.fromkeys(filter(None, (_first(LEFT_OUT, cell) for cell in cells)))
    where = f"; left out of scale={left_out[0]}" if left_out else ""
    return needs(cells) + where + "".join(f": {why}" for why in reasons)


def _first(reasons: Sequence[tuple[dict[str, str], str]], cell: str) -> str:
    settings = settings_of(cell).items()
    return next((why for wanted, why in reasons if wanted.items() <= settings), "")


MARGIN = 1.0
"""Points (metrics are in percent) within which two modes, or our mean and the paper's, count as alike."""
REPRODUCED, DIFFERS, INCOMPLETE = "reproduced", "differs", "incomplete"
REDUCED, NOT_RUN, QUOTED, UNPRINTED = "reduced only", "not run", "quoted", "not in the paper"
UNINFORMATIVE = "uninformative"
STATUSES = {
    REPRODUCED: f"scale=paper, all seeds, and the mean within {MARGIN:g} point of the paper's",
    DIFFERS: f"scale=paper, all seeds, and the mean further than {MARGIN:g} point from the paper's",
    INCOMPLETE: "scale=paper, but seeds are missing: no verdict",
    UNPRINTED: "scale=paper, but the paper has no number",
    REDUCED: "smaller data, model or training, or another model: not to be compared with the paper's number",
    UNINFORMATIVE: f"reduced, and less than {LEARNT:g} points better than a constant prediction: no conclusion",
    NOT_RUN: "there is no row",
    QUOTED: "the paper quotes the number from other work, so it is not reproduced",
}
"""Each status and what it means."""
STAND_IN, UNMEASURED = "paper:", "not measured"
"""Prefixes of notes: for a cell that replaces an unavailable one, and for a number that the paper did not measure."""


def compare(
    number: Mapping[Any, Any],
    measured: Summary,
    expected: int,
    scale: str,
    cells: Sequence[str],
    sweep: Sweep,
    weak: str = "",
) -> tuple[str, str]:
    """Status and reason for one number of the paper (a line of `read_paper`) and what was measured at `scale`.

    `cells` are our cells for it; without any, the number is quoted. Only rows at the paper's scale are compared. `weak`
    says why the cells hardly learned.
    """
    if not cells:
        return QUOTED, number["note"]
    if not measured.n:
        return NOT_RUN, why_not_run(sweep, cells)
    if scale != PAPER and weak:
        return UNINFORMATIVE, f"scale={scale}; {weak}"
    if scale != PAPER:
        return REDUCED, f"scale={scale}; {needs(cells)}"
    if number["note"].startswith(STAND_IN):
        return REDUCED, number["note"]
    if measured.n < expected:
        return INCOMPLETE, f"{measured.n} of {expected} seeds"
    if number["note"].startswith(UNMEASURED) or math.isnan(number["value"]):
        return UNPRINTED, number["note"]
    difference = measured.mean - number["value"]
    words = f"by {difference:+.2f} points"
    if not math.isnan(measured.low):
        inside = measured.low <= number["value"] <= measured.high
        words += f"; the 95 % interval of our mean {'contains' if inside else 'does not contain'} the paper's"
    return (REPRODUCED if abs(difference) <= MARGIN else DIFFERS), words
