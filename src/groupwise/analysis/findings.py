"""Writes docs/findings.md, what the rows say about the paper's claims:  python -m groupwise.analysis.findings"""

import argparse
import math
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from groupwise.analysis.benchmark_tables import between_markers, markdown
from groupwise.analysis.claims import (
    AGREEMENT,
    CLAIMS,
    DISAGREEMENT,
    KINDS,
    LEARNT,
    UNDECIDED,
    Verdict,
    judge,
)
from groupwise.analysis.paper import Folders
from groupwise.analysis.table_formats import number
from groupwise.atomic import write_text
from groupwise.errors import UserError
from groupwise.sweeps.cells import PAPER

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


def fill(text: str, page: Path, found: Sequence[Verdict]) -> str:
    """The text of `page` with the parts between its markers made anew."""
    text = between_markers(text, "summary", summary(found), page)
    text = between_markers(text, "claims", findings_table(found), page)
    return between_markers(text, "rules", rules(), page)


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m groupwise.analysis.findings")
    parser.add_argument("--page", type=Path, default=Path("docs/findings.md"))
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
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(summary(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
