"""Checks a finished run from its own record:  python -m groupwise.audit.reaccount results/runs/HASH

Recomputes epsilon by accountants that the run did not use, checks that plan, noise, steps and flags follow from the
configuration, and compares hashes. It reads, and trusts no figure that can be worked out; it cannot know what somebody
wrote who could make all files of the folder anew.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Collection
from pathlib import Path

from groupwise.audit.reaccount import accounts, plan
from groupwise.audit.reaccount import plan as origin
from groupwise.audit.reaccount import record as files
from groupwise.audit.reaccount.record import FAILED, Check, Record, perform, table
from groupwise.errors import command

CHECKS: dict[str, Callable[[Record], str]] = {
    "files": files.sums,
    "configuration": files.config_hash,
    "result row": files.row,
    "key of the noise": files.no_key,
    "plan follows from the configuration": plan.from_config,
    "noise scales": plan.scales,
    "thresholds": plan.thresholds,
    "noise of every step": plan.noise_norms,
    "steps": plan.steps,
    "private or not": plan.private,
    "quoted epsilon": accounts.claim,
    "epsilon by another library": accounts.another_library,
    "epsilon by an integral of our own": accounts.own_integral,
    "data": origin.data,
    "code": origin.code,
}
UNTRAINED = ("files", "configuration", "result row", "key of the noise", "data", "code")
"""The checks of a run that trained nothing (`eval.shots`)."""


def verify(folder: Path, data: Path | None = None, names: Collection[str] = tuple(CHECKS)) -> list[Check]:
    """The checks of that name of the finished run in `folder`; `data` is where its data lie now.

    Raises:
        UserError: that is no finished run.
    """
    record = Record.open(folder, data)
    chosen = [name for name in CHECKS if name in names]
    try:
        untrained = record.in_context
    except (OSError, ValueError, TypeError, AttributeError):
        untrained = False  # the checks themselves will say what is wrong with config.yaml
    if untrained:
        chosen = [name for name in chosen if name in UNTRAINED]
    return [perform(name, CHECKS[name], record) for name in chosen]


@command
def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit code: 0 all right, 1 a check failed, 2 no finished run."""
    parser = argparse.ArgumentParser(
        prog="python -m groupwise.audit.reaccount", description=(__doc__ or "").split("\n")[0].split(":")[0] + "."
    )
    parser.add_argument("run", type=Path, help="the run's folder, results/runs/HASH")
    parser.add_argument("--data", type=Path, help="where its data are, if not where the run had them")
    given = parser.parse_args(arguments)
    checks = verify(given.run, given.data)
    print(table(checks))
    failed = [check.name for check in checks if check.result == FAILED]
    print(f"\n{given.run}: " + (f"FAILED: {', '.join(failed)}" if failed else "nothing is wrong with it"))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
