"""The table of planted bugs: rows, CSV, Markdown."""

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass

from groupwise.audit.two_worlds import Distinguished

HEAD = (
    "name",
    "bug",
    "claimed_epsilon",
    "delta",
    "bug_epsilon",
    "correct_epsilon",
    "bug_epsilon_if_gaussian",
    "correct_epsilon_if_gaussian",
    "true_epsilon_of_bug",
    "plays",
    "caught",
    "how",
)


@dataclass(frozen=True)
class Row:
    """What was measured of one bug.

    Args:
        name, bug, how: the case's. claimed: ε at `delta`.
        correct, planted: without and with the bug.
        true: ε of the bug, where a formula gives it.
    """

    name: str
    bug: str
    how: str
    claimed: float
    delta: float
    correct: Distinguished
    planted: Distinguished
    true: float | None

    @property
    def caught(self) -> bool:
        """The bug is shown to break the claim."""
        return self.planted.epsilon > self.claimed

    @property
    def sound(self) -> bool:
        """The code without the bug is not."""
        return self.correct.epsilon <= self.claimed


def as_csv(rows: Sequence[Row]) -> str:
    """One header, one line a bug, by name."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(HEAD)
    for row in sorted(rows, key=lambda row: row.name):
        gaussian = row.true is not None
        writer.writerow(
            [
                row.name,
                row.bug,
                f"{row.claimed:g}",
                f"{row.delta:g}",
                f"{row.planted.epsilon:.3f}",
                f"{row.correct.epsilon:.3f}",
                f"{row.planted.gaussian_epsilon:.3f}" if gaussian else "",
                f"{row.correct.gaussian_epsilon:.3f}" if gaussian else "",
                "" if row.true is None else f"{row.true:.3f}",
                row.planted.plays,
                "yes" if row.caught else "no",
                row.how,
            ]
        )
    return text.getvalue()


def as_markdown(rows: Sequence[Row]) -> str:
    """The table that the command prints."""
    lines = [
        "| bug | claimed ε | ε of the bug, at least | ε of the code as it is, at least | plays | how |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        found = f"{row.planted.epsilon:.2f}{'' if row.caught else ' (NOT CAUGHT)'}"
        right = f"{row.correct.epsilon:.2f}{'' if row.sound else ' (ABOVE THE CLAIM)'}"
        lines.append(f"| {row.bug} | {row.claimed:g} | {found} | {right} | {row.planted.plays} | {row.how} |")
    return "\n".join(lines)
