"""Tests the paper's claims on the measured rows.

A claim is tested on paired differences, between runs that share a seed and differ only in the setting of the claim.
Seeds are clusters; budgets, epochs and tasks are fixed effects. `rules` has the rules for a verdict.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import pandas as pd

from groupwise.analysis.claims import ALIKE, CLAIMS, KINDS, LESS, MORE, NO_WORSE, Claim
from groupwise.analysis.results import (
    LEARNT,
    MINUS,
    SHOWN,
    TABLES,
    Folders,
    Page,
    floor_of,
    number,
    read_floors,
    read_measured,
    read_paper,
    settings_of,
    why_uninformative,
)
from groupwise.analysis.statistics import (
    MARGIN,
    SAME,
    Contrast,
    Summary,
    differences,
    holm,
    over_seeds,
    p_beyond,
    p_trend,
    places_of,
    summarise,
)
from groupwise.rows import markdown, table_path
from groupwise.sweeps.cells import PAPER, Sweep, read_sweep

LEAST = 3
"""The number of seeds that a verdict needs; the paper's tables have as many."""
LEVEL = 0.05
"""The significance level of all verdicts together, and of the test for a trend over ε."""
AGREEMENT, DISAGREEMENT, UNDECIDED = "agreement", "disagreement", "not enough evidence"
BUDGET = "privacy.epsilon"


@dataclass(frozen=True)
class Verdict:
    """A claim and the evidence at one scale ("" if there is none).

    Attributes:
        epsilon: the budget, if the effect depends on it; "" for all budgets together.
        paper: the same difference between the paper's printed numbers, at the same places; NaN if there are none.
        measured: a summary over seeds of the mean over places.
        places: the number of combinations of other settings (budgets, epochs, tasks).
        supports: one-sided p against "the claim does not hold", and `opposes` against "it does"; NaN without a test.
        p: two-sided, adjusted by Holm's method over the page.
        word: `AGREEMENT`, `DISAGREEMENT` or `UNDECIDED`.
        why: the reason if there is no verdict, or a caveat.
        instead: the model of a reduced scale and its trainable part if they are not the paper's, and the tasks that are
            left out.
    """

    claim: Claim
    scale: str
    epsilon: str
    paper: float
    measured: Summary
    places: int
    supports: float = math.nan
    opposes: float = math.nan
    p: float = math.nan
    word: str = UNDECIDED
    why: str = ""
    instead: str = ""

    @property
    def where(self) -> str:
        """The scale, and which networks its cells train."""
        if not self.scale:
            return "none yet"
        if self.claim.ours:
            return "networks that are not the paper's"
        kind = "the paper's cells" if self.scale == PAPER else "reduced"
        return f"scale={self.scale} ({kind})"

    @property
    def alone(self) -> float:
        """The two-sided p of this line, not adjusted."""
        return min(1.0, 2 * min(self.supports, self.opposes)) if not math.isnan(self.supports) else math.nan


def judge(claim: Claim, folders: Folders) -> list[Verdict]:
    """The claim at each scale that has a pair of runs for it, the paper's first; `decide` adds the verdicts.

    Without any pair there is one entry that says so. If the effect depends on ε, there is one entry for each ε.

    Raises:
        UserError: no such sweep, or invalid rows.
    """
    sweep = read_sweep(folders.sweeps / f"{claim.contrast.sweep}.yaml")
    paper = _paper(claim.contrast, sweep, folders)
    found = []
    for scale in SHOWN:
        if table_path(folders.measured, sweep.name, scale).is_file():
            found += _at_scale(claim, sweep, scale, paper, folders)
    printed = summarise(over_seeds(paper, places_of(paper))).mean
    return found or [Verdict(claim, "", "", printed, summarise([]), 0, why="no pairs of runs")]


def _at_scale(claim: Claim, sweep: Sweep, scale: str, paper: pd.DataFrame, folders: Folders) -> list[Verdict]:
    contrast = claim.contrast
    planned = [(cell.name, cell.seed) for cell in sweep.cells(scale) if contrast.uses(cell.name)]
    used = sorted({name for name, _ in planned})
    rows = read_measured(sweep, scale, folders.measured, {cell: [contrast.metric] for cell in used}).rows
    rows = rows[rows["cell"].isin(used)]
    values = dict(zip(zip(rows["cell"], rows["seed"], strict=True), rows.get(contrast.metric, ()), strict=True))
    pairs, wanted = differences(contrast, values), differences(contrast, dict.fromkeys(planned, 0.0))
    if pairs.empty:
        return []
    everywhere, weak = places_of(pairs), _weak(contrast, pairs, folders)
    names = {why: " and ".join(name for name, same in weak.values() if same == why) for _, why in weak.values()}
    why = "; ".join(f"{name}: {why}" if name else why for why, name in names.items())
    why = why or _obstacle(contrast, sweep, scale, pairs, wanted, folders) or _two_devices(rows)
    places = [place for place in everywhere if place not in weak] or everywhere
    parts = {"": places}
    if len(pairs) == len(wanted) and not weak and _depends(pairs):
        parts = {budget: [at for at in places if settings_of(at)[BUDGET] == budget] for budget in _budgets(places)}
    found = [_verdict(claim, scale, epsilon, paper, pairs, places, why) for epsilon, places in parts.items()]
    instead = [_instead(contrast, sweep, scale)]
    if len(places) < len(everywhere):
        instead += ["without " + " and ".join(name for name, _ in weak.values())]
    return [replace(verdict, instead=", ".join(filter(None, instead))) for verdict in found]


def _instead(contrast: Contrast, sweep: Sweep, scale: str) -> str:
    """The model of this scale, "model=roberta_tiny, model.trains=all"; empty if it is the paper's."""
    used = [cell for cell in sweep.cells(scale) if contrast.uses(cell.name)]
    other = {item for cell in used for item in cell.overrides if item not in cell.name.split()}
    return ", ".join(sorted(item for item in other if item.startswith(("model=", "model.trains="))))


def _obstacle(
    contrast: Contrast, sweep: Sweep, scale: str, pairs: pd.DataFrame, wanted: pd.DataFrame, folders: Folders
) -> str:
    """Why these pairs allow no verdict (some are missing, or the baseline is unknown); empty if they allow one."""
    full = places_of(differences(contrast, {(cell.name, cell.seed): 0.0 for cell in sweep.cells(PAPER)}))
    if left_out := len(set(full) - set(places_of(wanted))):
        return f"scale={scale} leaves out {left_out} of {len(full)} places"
    if missing := len(wanted) - len(pairs):
        return f"{missing} of {len(wanted)} pairs were not run"
    tasks = {_task(contrast, place) for place in places_of(wanted)}
    floors = read_floors(folders.measured)
    if scale != PAPER and any(floor_of(task, contrast.metric, floors) is None for task in tasks):
        return "the constant-prediction baseline is unknown"
    return ""


def _two_devices(rows: pd.DataFrame) -> str:
    """Why rows allow no verdict if one seed's come from a GPU and a CPU, which draw other random numbers."""
    kinds = rows.get("system.device_type", pd.Series("", rows.index)).groupby(rows["seed"]).nunique()
    return "runs of a seed are from a CPU and from a GPU" if kinds.max() > 1 else ""


def _weak(contrast: Contrast, pairs: pd.DataFrame, folders: Folders) -> dict[str, tuple[str, str]]:
    """Places where no cell learned, each with a short name and the reason. Then the claim gets no verdict, and the
    effect is that of the other places."""
    floors, best = read_floors(folders.measured), pairs.drop(columns="effect").groupby("place").mean().max(axis=1)
    shared = set.intersection(*(set(place.split()) for place in best.index))
    found = {}
    for place, value in best.items():
        if why := why_uninformative(_task(contrast, str(place)), contrast.metric, float(value), floors):
            found[str(place)] = (" ".join(word for word in str(place).split() if word not in shared), why)
    return found


def _task(contrast: Contrast, place: str) -> str:
    return settings_of(place).get("task", contrast.where.get("task", ""))


def _budgets(places: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(settings_of(place).get(BUDGET, "") for place in places))


def _depends(pairs: pd.DataFrame) -> bool:
    """Whether the effect has a trend over ε, by the seeds that all places have."""
    if "" in _budgets(places_of(pairs)):
        return False
    table = pairs["effect"].unstack("seed").dropna(axis=1)
    table = table.groupby(lambda place: float(settings_of(place)[BUDGET])).mean()
    p = p_trend(table.to_numpy().tolist(), table.index.tolist())
    return not math.isnan(p) and p < LEVEL


def _verdict(
    claim: Claim, scale: str, epsilon: str, paper: pd.DataFrame, pairs: pd.DataFrame, places: list[str], why: str
) -> Verdict:
    measured = summarise(over_seeds(pairs, places))
    printed = [place for place in places_of(paper) if place in places]
    verdict = Verdict(claim, scale, epsilon, summarise(over_seeds(paper, printed)).mean, measured, len(places))
    if not why and measured.n < LEAST:
        why = "one seed" if measured.n == 1 else f"{measured.n} seeds, fewer than {LEAST}"
    elif not why and measured.std < SAME:
        why = "the difference is the same for all seeds"
    if why:
        return replace(verdict, why=why)
    supports, opposes = _tests(claim.kind, measured)
    return replace(verdict, supports=supports, opposes=opposes)


def _tests(kind: str, measured: Summary) -> tuple[float, float]:
    """One-sided p values for the claim and against it; of equivalence by two one-sided tests."""
    above, below = (partial(p_beyond, measured, above=side) for side in (True, False))
    return {
        LESS: (below(0), above(0)),
        MORE: (above(0), below(0)),
        ALIKE: (max(above(-MARGIN), below(MARGIN)), min(below(-MARGIN), above(MARGIN))),
        NO_WORSE: (above(-MARGIN), below(-MARGIN)),
    }[kind]


def decide(found: Sequence[Verdict]) -> list[Verdict]:
    """The verdicts of all claims, with p adjusted over all of them together."""
    adjusted = holm([verdict.alone for verdict in found])
    decided = []
    for verdict, p in zip(found, adjusted, strict=True):
        if math.isnan(p):
            decided.append(verdict)
        elif p >= LEVEL:
            decided.append(replace(verdict, p=p, why="too few seeds or too much spread"))
        else:
            word = AGREEMENT if verdict.supports < verdict.opposes else DISAGREEMENT
            small = verdict.claim.kind in (LESS, MORE) and abs(verdict.measured.mean) < MARGIN
            decided.append(replace(verdict, p=p, word=word, why="below a point" if small else ""))
    return decided


def _paper(contrast: Contrast, sweep: Sweep, folders: Folders) -> pd.DataFrame:
    if sweep.name not in TABLES:
        return differences(contrast, {})
    paper = read_paper(sweep.name, folders.paper)
    paper = paper[(paper["metric"] == contrast.metric) & (paper["cell"] != "") & paper["value"].notna()]
    names = list(dict.fromkeys(cell.name for cell in sweep.cells(PAPER)))
    values: dict[tuple[str, int], float] = {}
    for cell, value in zip(paper["cell"], paper["value"], strict=True):
        if MINUS not in cell:
            wanted = set(cell.split())
            values |= {(name, 0): value for name in names if wanted <= set(name.split())}
    return differences(contrast, values)


def verdicts(folders: Folders) -> list[Verdict]:
    """Every claim with its verdict, at each scale that has rows; raises as `judge` does."""
    return decide([verdict for claim in CLAIMS for verdict in judge(claim, folders)])


def findings_table(found: Sequence[Verdict]) -> str:
    """The table of verdicts in Markdown."""
    head = ["claim", "on", "scale", "ε", "paper", "measured", "95 % interval", "seeds × places", "p", "Holm", "verdict"]
    rows = []
    for verdict in found:
        measured, claim = verdict.measured, verdict.claim
        span = "–" if math.isnan(measured.low) else f"{number(measured.low)} to {number(measured.high)}"
        on = claim.on + (f" (here {verdict.instead})" if verdict.instead else "")
        scale = "not the paper's" if verdict.scale and claim.ours else verdict.scale or "–"
        seeds = f"{measured.n} × {verdict.places}" if measured.n else "–"
        numbers = [number(verdict.paper), number(measured.mean), span, seeds]
        numbers += [p_in_words(p) for p in (verdict.alone, verdict.p)]
        word = verdict.word + (f" ({verdict.why})" if verdict.why else "")
        rows.append([claim.says, on, scale, verdict.epsilon or "all", *numbers, word])
    return markdown(head, rows)


def summary(found: Sequence[Verdict]) -> str:
    """How many lines (claims at a scale and ε) have each verdict, as a table with a line for each kind of rows."""
    verdicts = (AGREEMENT, DISAGREEMENT, UNDECIDED)
    counts = Counter((verdict.where, verdict.word) for verdict in found)
    places = dict.fromkeys(verdict.where for verdict in found)
    rows = [[place, *(str(counts[place, word]) for word in verdicts)] for place in places]
    return markdown(["rows", *verdicts], rows)


def rules() -> str:
    """The rules for a verdict, in Markdown."""
    lines = [
        "- The test uses one number per seed: its mean over the budgets, epochs and tasks (places).",
        "- If the effect has a trend over log ε (F-test at 5 %), each ε is tested separately.",
        "- p: twice the smaller of the p values for and against the claim (t-tests). Holm: p adjusted over all lines "
        f"together; a verdict needs it below {LEVEL:g}.",
        f"- There is no verdict with fewer than {LEAST} seeds, if a pair of the sweep was not run, or if the scale "
        "leaves out a place. Intervals are not adjusted.",
        "- Intervals and p are over seeds, which share one test set. They leave out the error of a finite test set: on "
        "SST-2 (872 sentences) an accuracy has a standard error of 1.4 points.",
        *(f"- `{kind}`: agreement when {words}." for kind, words in KINDS.items()),
    ]
    kinds = "; ".join(f"{verdict}: `{kind}`" for verdict, kind in {c.says: c.kind for c in CLAIMS}.items())
    lines.append(f"- The claims: {kinds}.")
    lines.append(f"- A place counts if a compared cell is {LEARNT:g} points better than a constant prediction there.")
    return "\n".join(lines)


def p_in_words(p: float) -> str:
    """A p value with two digits, or a dash if there is no test."""
    if math.isnan(p):
        return "–"
    return "< 0.001" if p < 0.001 else f"{p:.2g}"


def page(folders: Folders) -> Page:
    """The page of every claim and the rules for a verdict, with its summary for docs/findings.md; raises as `judge`."""
    found = verdicts(folders)
    return Page(findings_page(found), f"{len(found)} lines; a claim may have several", {"summary": summary(found)})


def findings_page(found: Sequence[Verdict]) -> str:
    """The page of these verdicts."""
    parts = (
        "# The paper's claims, tested on the measured rows",
        "Made by `python -m groupwise.analysis.tables findings`. Rows below `scale=paper` are no reproduction. `paper` "
        "is the same difference in the paper's numbers. The counts are of lines below; a claim may have several.",
        summary(found),
        findings_table(found),
        "## How a verdict is reached",
        rules(),
    )
    return "\n\n".join(parts) + "\n"
