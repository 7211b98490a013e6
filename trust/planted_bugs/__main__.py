"""Plant each bug in the real trainer and measure what it leaks: `python -m trust.planted_bugs`.

For every bug two neighbouring data sets and an attack are chosen that show it. Thousands of plays of both data sets,
through the code as it is and through the code with the bug, bound ε from below at 95 %. The code as it is must stay
below the claimed ε, and every bug must come out above it; exit code 1 otherwise.
"""

import argparse
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from groupwise.atomic import write_text
from groupwise.audit.two_worlds import distinguish
from groupwise.privacy.accountants import gaussian_epsilon
from trust.planted_bugs.cases import CASES, Case
from trust.planted_bugs.table import Row, as_csv, as_markdown
from trust.planted_bugs.worst import WorstCounts

EPSILON, DELTA = 1.0, 1e-5
RESULT = Path(__file__).resolve().parents[2] / "results" / "trust" / "planted.csv"


def measure(case: Case, plays: int | None = None, seed: int = 0) -> Row:
    """Both measurements of one bug; `plays` of each of two worlds, twice (None: as many as the case wants)."""
    plays = plays or case.plays
    right, wrong = (case.worst.worlds(EPSILON, DELTA, 2 * seed + planted) for planted in (0, 1))
    with case.around():
        correct = distinguish(*right, plays, DELTA)
        with case.plant():  # the worlds are ready, so that the check before training does not refuse the bug
            planted = distinguish(*wrong, plays, DELTA)
    return Row(case.name, case.bug, case.how, EPSILON, DELTA, correct, planted, _true(case))


def _true(case: Case) -> float | None:
    """ε of a Gaussian release that is `case.factor` times too narrow."""
    if case.factor is None or math.isinf(case.factor):
        return case.factor
    plan = case.worst.plan(EPSILON, DELTA)
    share = math.sqrt(plan.quantile_budget) if isinstance(case.worst, WorstCounts) else 1.0
    return gaussian_epsilon(DELTA, case.factor * share / plan.noise_multiplier)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and write the table when all bugs were measured; 1 where a bound is on the wrong side."""
    names = [case.name for case in CASES]
    parser = argparse.ArgumentParser(prog="python -m trust.planted_bugs", description=__doc__.partition("\n\n")[0])
    parser.add_argument("--only", nargs="+", choices=names, metavar="NAME", help=f"some bugs: {', '.join(names)}")
    parser.add_argument("--plays", type=int, help="of each world, for every bug; fewer are quicker and show less")
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
    print(as_markdown(rows))
    if not options.only and options.plays is None:
        RESULT.parent.mkdir(parents=True, exist_ok=True)
        write_text(RESULT, as_csv(rows))
    return 0 if all(row.caught and row.sound for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
