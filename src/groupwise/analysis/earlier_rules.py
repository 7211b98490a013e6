"""Judges the claims by the rules of before, beside today's verdicts:  python -m groupwise.analysis.earlier_rules

Until commit 4d504be every pair of runs was a witness of its own (two budgets of three seeds counted as six), nothing
was adjusted for the number of claims, and an interval on one side was a verdict. The table says what that was worth.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from groupwise.analysis.claims import ALIKE, CLAIMS, LESS, MARGIN, MORE, NO_WORSE, Claim
from groupwise.analysis.findings import AGREEMENT, DISAGREEMENT, UNDECIDED, Verdict, measured_pairs, verdicts
from groupwise.analysis.results import SHOWN, Folders, file_of
from groupwise.analysis.statistics import Summary, summarise
from groupwise.analysis.tables import number
from groupwise.atomic import write_text
from groupwise.errors import command
from groupwise.rows import markdown
from groupwise.sweeps.cells import read_sweep

WORDS = (AGREEMENT, DISAGREEMENT, UNDECIDED)


def pooled(claim: Claim, scale: str, folders: Folders) -> Summary:
    """The differences of all pairs at once, whatever their budget, epochs, task and seed.

    Raises:
        UserError: no such sweep, or rows at fault.
    """
    sweep = read_sweep(folders.sweeps / f"{claim.contrast.sweep}.yaml")
    pairs, _ = measured_pairs(claim.contrast, sweep, scale, folders)
    return summarise([difference for seeds in pairs.pairs.values() for difference in seeds.values()])


def earlier_word(kind: str, found: Summary) -> str:
    """The verdict of before: the whole 95 % t-interval on one side."""
    low, high = found.low, found.high
    supports = {LESS: high < 0, MORE: low > 0, ALIKE: low > -MARGIN and high < MARGIN, NO_WORSE: low > -MARGIN}[kind]
    opposes = {LESS: low > 0, MORE: high < 0, ALIKE: low > MARGIN or high < -MARGIN, NO_WORSE: high < -MARGIN}[kind]
    return AGREEMENT if supports else DISAGREEMENT if opposes else UNDECIDED


def beside(found: Sequence[Verdict], folders: Folders) -> list[list[str]]:
    """A row for each claim and scale with rows: claim, on, scale, pairs, interval, the word of before, today's."""
    rows = []
    for claim in CLAIMS:
        sweep = read_sweep(folders.sweeps / f"{claim.contrast.sweep}.yaml")
        for scale in (at for at in SHOWN if file_of(sweep, at, folders.measured).is_file()):
            today = [verdict for verdict in found if verdict.claim is claim and verdict.scale == scale]
            if not today:
                continue
            all_pairs = pooled(claim, scale, folders)
            span = "–" if all_pairs.n < 2 else f"{number(all_pairs.low)} to {number(all_pairs.high)}"
            before = earlier_word(claim.kind, all_pairs)
            rows.append([claim.says, claim.on, scale, str(all_pairs.n), span, before, _today(today)])
    return rows


def _today(found: Sequence[Verdict]) -> str:
    """The verdicts of one claim, those of several ε together where they are the same."""
    words: dict[str, list[str]] = {}
    for verdict in found:
        words.setdefault(verdict.said, []).append(verdict.epsilon)
    return "; ".join(f"ε = {', '.join(at)}: {word}" if any(at) else word for word, at in words.items())


def page(found: Sequence[Verdict], folders: Folders) -> str:
    """The table in Markdown, under how often each word was and is said."""
    rows = beside(found, folders)
    before, today = Counter(row[5] for row in rows), Counter(verdict.word for verdict in found if verdict.scale)
    counts = [[word, str(before[word]), str(today[word])] for word in WORDS]
    head = ["claim", "on", "scale", "pairs", "95 % interval over pairs", "before", "today"]
    parts = (
        "# Verdicts before and after",
        "Made by `python -m groupwise.analysis.earlier_rules`, from the same rows by two sets of rules. Before: every "
        "pair of runs a witness, p not adjusted. Today: [findings](findings.md). Where an effect depends on ε, a claim "
        "has a verdict for each.",
        markdown(["verdict", "before", "today"], counts),
        markdown(head, rows),
    )
    return "\n\n".join(parts) + "\n"


@command
def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m groupwise.analysis.earlier_rules")
    parser.add_argument("--out", type=Path, default=Path("results/tables"))
    Folders.add_options(parser)
    given = parser.parse_args(arguments)
    text = page(verdicts(Folders.given(given)), Folders.given(given))
    given.out.mkdir(parents=True, exist_ok=True)
    write_text(given.out / "verdicts.md", text)
    print(given.out / "verdicts.md")
    return 0


if __name__ == "__main__":
    sys.exit(main())
