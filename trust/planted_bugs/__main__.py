"""Plant each bug in the real trainer and measure what it leaks: `python -m trust.planted_bugs`.

Each bug has two neighbouring data sets and an attack that reveal it. The code with and without the bug trains on both
data sets many times, which gives a lower bound on ε with 95 % confidence. The bound must be at most the claimed ε
without the bug, and above it with the bug; otherwise the exit code is 1.
"""

import argparse
import csv
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from groupwise.atomic import write_text
from groupwise.audit.two_worlds import distinguish
from groupwise.privacy.accountants import gaussian_epsilon
from groupwise.rows import csv_text
from trust.page import planted
from trust.planted_bugs.cases import CASES, Case
from trust.planted_bugs.worst import WorstCounts

HEAD = (
    *("name", "bug", "claimed_epsilon", "delta", "bug_epsilon", "correct_epsilon"),
    *("true_epsilon_of_bug", "plays", "caught", "how"),
)


@dataclass(frozen=True)
class Row:
    """The measurements of one bug.

    Args:
        name, bug, how: those of the case. claimed: ε at `delta`.
        correct, planted: the bounds on ε without and with the bug, from `plays` plays of each world.
        true: ε of the bug, if a formula gives it.
    """

    name: str
    bug: str
    how: str
    claimed: float
    delta: float
    plays: int
    correct: float
    planted: float
    true: float | None

    @property
    def caught(self) -> bool:
        """Whether the bound with the bug is above the claim."""
        return self.planted > self.claimed

    @property
    def sound(self) -> bool:
        """Whether the bound without the bug is at most the claim."""
        return self.correct <= self.claimed


def as_csv(rows: Sequence[Row], earlier: str = "") -> str:
    """A header and a line for each bug, sorted by name; lines of other bugs in the `earlier` text are kept."""
    measured = {row.name for row in rows}
    lines: list[list[Any]] = [line for line in csv.reader(earlier.splitlines()[1:]) if line[0] not in measured]
    for row in rows:
        epsilons = [row.planted, row.correct, *([] if row.true is None else [row.true])]
        cells = [*(f"{epsilon:.3f}" for epsilon in epsilons), ""][:3]
        end = [str(row.plays), "yes" if row.caught else "no", row.how]
        lines.append([row.name, row.bug, f"{row.claimed:g}", f"{row.delta:g}", *cells, *end])
    return csv_text(HEAD, sorted(lines))


EPSILON, DELTA = 1.0, 1e-5
RESULT = Path(__file__).resolve().parents[2] / "results" / "trust" / "planted.csv"


def measure(case: Case, plays: int | None = None, seed: int = 0) -> Row:
    """Both measurements of one bug, each with `plays` plays of two worlds (None: the number of the case)."""
    plays = plays or case.plays
    right, wrong = (case.worst.worlds(EPSILON, DELTA, 2 * seed + planted) for planted in (0, 1))
    correct = distinguish(*right, plays, DELTA)
    with case.plant():  # not before the worlds are built: the check before training would refuse the bug
        planted = distinguish(*wrong, plays, DELTA)
    return Row(case.name, case.bug, case.how, EPSILON, DELTA, plays, correct, planted, _true(case))


def _true(case: Case) -> float | None:
    """ε of a Gaussian release whose noise is too small by `case.factor`."""
    if case.factor is None or math.isinf(case.factor):
        return case.factor
    plan = case.worst.plan(EPSILON, DELTA)
    share = math.sqrt(plan.quantile_budget) if isinstance(case.worst, WorstCounts) else 1.0
    return gaussian_epsilon(DELTA, case.factor * share / plan.noise_multiplier)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and write the rows unless --plays was given; returns 1 if a row is not caught or not sound."""
    names = [case.name for case in CASES]
    parser = argparse.ArgumentParser(prog="python -m trust.planted_bugs", description=__doc__.partition("\n\n")[0])
    parser.add_argument("--only", nargs="+", choices=names, metavar="NAME", help=f"some bugs: {', '.join(names)}")
    parser.add_argument("--plays", type=int, help="plays of each world; fewer are faster, with weaker bounds")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    if options.plays is not None and options.plays < 2:
        parser.error("--plays takes a number of at least 2")
    torch.set_num_threads(1)
    rows = []
    for case in CASES:
        if case.name in (options.only or names):
            start = time.monotonic()
            rows.append(measure(case, options.plays, options.seed))
            print(f"{case.name}: {time.monotonic() - start:.0f} s", file=sys.stderr)
    print(planted(list(csv.DictReader(as_csv(rows).splitlines()))))
    for row in rows:
        if not row.caught or not row.sound:
            found = f"{row.planted:.2f} with the bug, {row.correct:.2f} without"
            print(f"{row.name}: at least {found}, where {row.claimed:g} is claimed", file=sys.stderr)
    if options.plays is None:
        write_text(RESULT, as_csv(rows, RESULT.read_text() if options.only and RESULT.exists() else ""))
    return 0 if all(row.caught and row.sound for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
