"""Test runs under the faults of clusters and disks:  python -m trust.faults  (or some: ... sigkill disk)

It prints a table of faults, trials, lost trials and outcomes, and writes results/trust/faults.csv if all faults had
their usual number of trials. A trial is lost if the run does not end with the same bits as an undisturbed one, or if a
message is longer than one sentence.
It needs Linux; the full disk also needs root, and is skipped without it.
"""

import argparse
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from groupwise.atomic import write_text
from groupwise.rows import csv_text, markdown
from trust.faults.examples import not_finite
from trust.faults.folders import both_altered, checkpoint_altered, data_altered, two
from trust.faults.kill import stopped
from trust.faults.process import Outcome
from trust.faults.shortage import full, halved, too_large, too_large_for_one, unwritable

Fault = Callable[[int, Path], list[Outcome]]
"""(number of trials, an empty folder) -> rows."""


def _each(*faults: Callable[[int, Path], Outcome]) -> Fault:
    """A fault that tries all of these, each in its own folder."""
    return lambda trials, work: [fault(trials, work / fault.__name__) for fault in faults]


FAULTS: dict[str, tuple[Fault, int]] = {
    "sigkill": (lambda trials, work: [stopped(signal.SIGKILL, trials, work)], 60),
    "sigterm": (lambda trials, work: [stopped(signal.SIGTERM, trials, work, seed=1)], 20),
    "disk": (_each(full, too_large, unwritable), 10),
    "files": (_each(checkpoint_altered, both_altered, data_altered), 12),
    "examples": (lambda trials, work: [not_finite(trials)], 180),
    "memory": (_each(halved, too_large_for_one), 3),
    "together": (_each(two), 6),
}
"""Name -> the function that tries it, and the number of trials."""
RESULT = Path("results/trust/faults.csv")


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns 1 if a trial was lost."""
    parser = argparse.ArgumentParser(prog="python -m trust.faults", description=__doc__.split("\n")[0])
    parser.add_argument("faults", nargs="*", metavar="FAULT", help=f"{', '.join(FAULTS)}; all if none is given")
    parser.add_argument("--trials", type=int, help="number of trials of each fault, instead of its default")
    parser.add_argument("--out", type=Path, help="where the table goes, whatever the numbers are")
    given = parser.parse_args(arguments)
    if unknown := [name for name in given.faults if name not in FAULTS]:
        parser.error(f"{unknown[0]} is no fault: choose from {', '.join(FAULTS)}.")
    rows: list[Outcome] = []
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        os.environ.setdefault("GROUPWISE_CACHE", str(Path(folder) / "cache"))
        for name in given.faults or FAULTS:
            began, (fault, usual) = time.monotonic(), FAULTS[name]
            work = Path(folder) / name
            work.mkdir()
            rows += fault(given.trials or usual, work)
            print(f"{name}: {time.monotonic() - began:.0f} s", file=sys.stderr)
    table = [[row.fault, str(row.tried), str(row.lost), row.result] for row in rows]
    print(markdown(["fault", "tried", "lost", "what happens"], table))
    if out := given.out or (None if given.faults or given.trials else RESULT):
        write_text(out, csv_text(["fault", "tried", "lost", "result"], table))
    return int(any(row.lost for row in rows))


if __name__ == "__main__":
    sys.exit(main())
