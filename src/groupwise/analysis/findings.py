"""Tests the paper's claims as differences, and says what the measured rows say about each.

A claim is judged by the mean of paired differences over budgets (and epochs, tasks) and seeds, with its 95 %
t-interval; p is of the paired t-test that the mean is zero, not adjusted for the number of claims. "Alike" and "no
worse" are claims of equivalence: they need a margin, and agreement means that the whole interval lies within it.
"""

import argparse
import math
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from groupwise.analysis.benchmark_tables import between_markers, markdown
from groupwise.analysis.measured import SHOWN, file_of, read_measured
from groupwise.analysis.paper import MINUS, TABLES, Folders, read_paper
from groupwise.analysis.statistics import Contrast, Summary, differences, p_of_no_difference, summarise
from groupwise.analysis.table_text import number
from groupwise.atomic import write_text
from groupwise.errors import UserError
from groupwise.sweeps.cells import PAPER, Sweep, read_sweep

MARGIN = 1.0
"""Points (all metrics are in percent) within which two ways of training count as alike."""
LEARNT = 5.0
"""Points by which the better of the compared cells must beat guessing for a verdict."""
GUESSING = {"cifar": 10.0, "sst2": 50.9}
"""Accuracy in percent of always saying the larger class."""
AGREEMENT, DISAGREEMENT, UNDECIDED = "agreement", "disagreement", "not enough evidence"
LESS, MORE, ALIKE, NO_WORSE = "less", "more", "alike", "no worse"
KINDS = {
    LESS: "the difference is below zero",
    MORE: "the difference is above zero",
    ALIKE: f"the difference is within ±{MARGIN:g} point",
    NO_WORSE: f"the difference is above −{MARGIN:g} point",
}


@dataclass(frozen=True)
class Claim:
    """What the paper says, and the difference that shows it."""

    says: str
    on: str
    contrast: Contrast
    kind: str


@dataclass(frozen=True)
class Verdict:
    """A claim before the rows of one scale ("" where there are none).

    Attributes:
        paper: the same difference between the paper's printed numbers; NaN where it prints none.
        measured: over pairs.
        p: NaN where there is no test.
        word: `AGREEMENT`, `DISAGREEMENT` or `UNDECIDED`.
        why: what kept it from a verdict, or what a reader should know.
    """

    claim: Claim
    scale: str
    paper: float
    measured: Summary
    p: float
    word: str
    why: str


CIFAR, SST2 = {"task": "cifar"}, {"task": "sst2", "model": "roberta_base"}


def _clip(*names: str) -> tuple[Mapping[str, str], ...]:
    return tuple({"clip": name} for name in names)


def _both(says: str, sweep: str, plus: tuple[str, ...], minus: tuple[str, ...], kind: str) -> tuple[Claim, ...]:
    tasks = {"CIFAR-10": CIFAR, "SST-2": SST2}
    return tuple(
        Claim(says, on, Contrast(sweep, _clip(*plus), _clip(*minus), where), kind) for on, where in tasks.items()
    )


NOISELESS = {"task": "cifar", "privacy": "noiseless"}
CLAIMS = (
    *_both("Fixed per-layer clipping loses to flat clipping", "fixed_per_layer", ("fixed_layer",), ("flat",), LESS),
    Claim(
        "Fixed per-layer clipping loses to flat clipping",
        "CIFAR-10 without noise",
        Contrast("adaptive_vs_fixed", _clip("fixed_layer"), _clip("flat"), NOISELESS),
        LESS,
    ),
    *_both(
        "Adaptive thresholds recover what fixed ones lose per layer",
        "adaptivity",
        ("adaptive_layer",),
        ("fixed_layer",),
        MORE,
    ),
    Claim(
        "Adaptive thresholds recover what fixed ones lose per layer",
        "CIFAR-10 without noise",
        Contrast("adaptive_vs_fixed", _clip("adaptive_layer"), _clip("fixed_layer"), NOISELESS),
        MORE,
    ),
    Claim(
        "Adaptive per-layer clipping is on par with flat clipping",
        "CIFAR-10",
        Contrast("cifar", _clip("adaptive_layer"), _clip("flat"), CIFAR),
        ALIKE,
    ),
    Claim(
        "Adaptive per-layer clipping is on par with flat clipping",
        "SST-2, RoBERTa-base, attention only",
        Contrast("sst2_epochs", _clip("adaptive_layer"), _clip("flat"), SST2),
        ALIKE,
    ),
    Claim(
        "Adaptive per-layer clipping is on par with flat clipping",
        "SST-2, RoBERTa-large, attention only",
        Contrast("sst2_epochs", _clip("adaptive_layer"), _clip("flat"), SST2 | {"model": "roberta_large"}),
        ALIKE,
    ),
    *(
        Claim(
            "Adaptive per-layer clipping is on par with flat clipping",
            f"E2E and DART, {label}",
            Contrast("table2text", _clip("adaptive_layer"), _clip("flat"), metric=metric),
            ALIKE,
        )
        for label, metric in (("BLEU", "test/bleu"), ("ROUGE-L", "test/rougeL"))
    ),
    *(
        Claim(
            "How the noise is shared among layers hardly matters",
            f"SST-2, {label} against global",
            Contrast("noise_allocation", ({"noise": noise},), ({"noise": "global"},), SST2),
            ALIKE,
        )
        for noise, label in (("equal_budget", "equal budget"), ("weighted", "weighted"))
    ),
    *(
        Claim(
            "A small share r of the budget suffices for the quantiles",
            f"SST-2, r = {share} % against 10 %",
            Contrast("quantile_budget", ({"clip.quantile_budget": r},), ({"clip.quantile_budget": "0.1"},), SST2),
            NO_WORSE,
        )
        for r, share in (("0.0001", "0.01"), ("0.001", "0.1"), ("0.01", "1"))
    ),
    *_both(
        "Adaptivity helps flat clipping less than per-layer clipping",
        "adaptivity",
        ("adaptive_layer", "flat"),
        ("fixed_layer", "adaptive_flat"),
        MORE,
    ),
    *_both(
        "Adaptive per-layer clipping is on par with adaptive flat clipping",
        "adaptivity",
        ("adaptive_layer",),
        ("adaptive_flat",),
        ALIKE,
    ),
)


def judge(claim: Claim, folders: Folders) -> list[Verdict]:
    """The claim at each scale that has a pair of runs for it, the paper's first; without any, one that says so.

    Raises:
        UserError: no such sweep, or rows at fault.
    """
    sweep = read_sweep(folders.sweeps / f"{claim.contrast.sweep}.yaml")
    paper = _paper(claim.contrast, sweep, folders)
    found = []
    for scale in SHOWN:
        if file_of(sweep, scale, folders.measured).is_file():
            verdict = _verdict(claim, sweep, scale, paper, folders)
            found += [verdict] if verdict.measured.n else []
    nothing = Verdict(claim, "", paper, summarise([]), math.nan, UNDECIDED, "no pairs of runs")
    return found or [nothing]


def _verdict(claim: Claim, sweep: Sweep, scale: str, paper: float, folders: Folders) -> Verdict:
    contrast = claim.contrast
    used = [cell.name for cell in sweep.cells(scale) if contrast.uses(cell.name)]
    rows = read_measured(sweep, scale, folders.measured, {cell: [contrast.metric] for cell in used}).rows
    rows = rows[rows["cell"].isin(used)]
    values = dict(zip(zip(rows["cell"], rows["seed"], strict=True), rows.get(contrast.metric, ()), strict=True))
    pairs = differences(contrast, values)
    measured = summarise(pairs.differences)
    p = p_of_no_difference(pairs.differences)
    word, why = decide(claim, measured, max(pairs.means, default=math.nan))
    if pairs.unpaired:
        why = f"{why}; {pairs.unpaired} runs without a partner left out".removeprefix("; ")
    return Verdict(claim, scale, paper, measured, p, word, why)


def decide(claim: Claim, measured: Summary, best: float) -> tuple[str, str]:
    """Verdict and reason from a mean difference, its interval, and the mean of the best of the cells behind it."""
    if measured.n < 2:
        return UNDECIDED, "one pair" if measured.n else "no pairs of runs"
    if measured.std < 1e-9:
        return UNDECIDED, "all pairs differ by the same"
    floor = GUESSING.get(claim.contrast.where.get("task", ""), -math.inf)
    if claim.contrast.metric.endswith("accuracy") and best < floor + LEARNT:
        return UNDECIDED, f"the runs hardly learn: {best:.1f} % at best, {floor:g} % by guessing"
    low, high = measured.low, measured.high
    holds, fails = {
        LESS: (high < 0, low > 0),
        MORE: (low > 0, high < 0),
        ALIKE: (low >= -MARGIN and high <= MARGIN, high < -MARGIN or low > MARGIN),
        NO_WORSE: (low >= -MARGIN, high < -MARGIN),
    }[claim.kind]
    if holds:
        return AGREEMENT, ""
    return (DISAGREEMENT, "") if fails else (UNDECIDED, "the interval is too wide")


def _paper(contrast: Contrast, sweep: Sweep, folders: Folders) -> float:
    if sweep.name not in TABLES:
        return math.nan
    paper = read_paper(sweep.name, folders.paper)
    paper = paper[(paper["metric"] == contrast.metric) & (paper["cell"] != "") & paper["value"].notna()]
    names = list(dict.fromkeys(cell.name for cell in sweep.cells(PAPER)))
    values: dict[tuple[str, int], float] = {}
    for cell, value in zip(paper["cell"], paper["value"], strict=True):
        if MINUS not in cell:
            wanted = set(cell.split())
            values |= {(name, 0): value for name in names if wanted <= set(name.split())}
    return summarise(differences(contrast, values).differences).mean


HEAD = ("claim", "on", "scale", "paper", "measured", "95 % interval", "pairs", "p", "verdict")


def verdicts(folders: Folders | None = None) -> list[Verdict]:
    """Every claim, at each scale that has rows; faults as `judge`."""
    return [verdict for claim in CLAIMS for verdict in judge(claim, folders or Folders())]


def findings_table(found: Sequence[Verdict]) -> str:
    """The table of verdicts in Markdown."""
    rows = []
    for verdict in found:
        measured = verdict.measured
        span = "–" if math.isnan(measured.low) else f"{number(measured.low)} to {number(measured.high)}"
        rows.append(
            [
                verdict.claim.says,
                verdict.claim.on,
                verdict.scale or "–",
                number(verdict.paper),
                number(measured.mean),
                span,
                str(measured.n),
                p_in_words(verdict.p),
                verdict.word + (f" ({verdict.why})" if verdict.why else ""),
            ]
        )
    return markdown(list(HEAD), rows)


def summary(found: Sequence[Verdict]) -> str:
    """One sentence: how many of each verdict, and at which scales."""
    if not any(verdict.scale for verdict in found):
        return "Nothing was measured yet."
    parts = []
    for scale in dict.fromkeys(verdict.scale for verdict in found if verdict.scale):
        words = Counter(verdict.word for verdict in found if verdict.scale == scale)
        counted = ", ".join(f"{words[word]} {word}" for word in (AGREEMENT, DISAGREEMENT, UNDECIDED) if words[word])
        kind = "the paper's cells" if scale == PAPER else "reduced"
        parts.append(f"at scale={scale} ({kind}): {counted}")
    unmeasured = sum(not verdict.scale for verdict in found)
    return f"Verdicts {'; '.join(parts)}{f'; {unmeasured} without rows' if unmeasured else ''}."


def rules() -> str:
    """How a verdict is reached."""
    lines = [f"- `{kind}`: agreement when {words}, with the whole interval." for kind, words in KINDS.items()]
    kinds = "; ".join(f"{verdict}: `{kind}`" for verdict, kind in {c.says: c.kind for c in CLAIMS}.items())
    lines.append(f"- The claims: {kinds}.")
    lines.append(f"- Nothing is decided where no compared cell beats guessing by {LEARNT:g} points.")
    return "\n".join(lines)


def p_in_words(p: float) -> str:
    """Two digits, or a dash where there is no test."""
    if math.isnan(p):
        return "–"
    return "< 0.001" if p < 0.001 else f"{p:.2g}"


def full(found: Sequence[Verdict]) -> str:
    """Every claim, and how a verdict is reached, as a page of its own."""
    parts = (
        "# The paper's claims, and what the measured rows say of them",
        "Made by `python -m groupwise.analysis.findings`. Rows below `scale=paper` are no reproduction. `paper` is the "
        "same difference between the paper's printed numbers, p of the paired t-test that the mean is zero.",
        summary(found),
        findings_table(found),
        "## How a verdict is reached",
        rules(),
    )
    return "\n\n".join(parts) + "\n"


def fill(text: str, page: Path, found: Sequence[Verdict]) -> str:
    """The text of `page` with the summary between its markers made anew."""
    return between_markers(text, "summary", summary(found), page)


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m groupwise.analysis.findings")
    parser.add_argument("--page", type=Path, default=Path("docs/findings.md"))
    parser.add_argument("--out", type=Path, default=Path("results/tables"))
    Folders.add_options(parser)
    given = parser.parse_args(arguments)
    try:
        if not given.page.is_file():
            raise UserError(f"There is no page {given.page}: name it with --page, or run from the project's folder.")
        before = given.page.read_text(encoding="utf-8")
        found = verdicts(Folders.given(given))
        text = fill(before, given.page, found)
        if text != before:
            write_text(given.page, text)
        given.out.mkdir(parents=True, exist_ok=True)
        write_text(given.out / "findings.md", full(found))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(summary(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
