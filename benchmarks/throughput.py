"""Speed and memory against non-private training:  python -m benchmarks.throughput workload=mlp method=all

Each method runs in a process of its own, in interleaved rounds. `--help` lists the options, `docs/benchmarks.md` says
how to read the results.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.options import HELP, Options, cases, parse
from groupwise.errors import UserError

MISTAKE, INTERRUPTED = 2, 130


def measure(options: Options) -> None:
    """Run all cases; each case's rows are written, and its table printed, as soon as it is done."""
    from benchmarks.driver import progress, run
    from benchmarks.results import FILE, merge, provenance, with_ratios
    from benchmarks.table import table

    for case in cases(options):
        found = run(case, options.methods, options.rounds, options.steps, options.limit, progress)
        rows = [row | provenance(case.device) for row in with_ratios(found)]
        merge(Path(options.out) / FILE, rows)
        print(table(rows), flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code: 0, 2 for a mistake, 130 when interrupted."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if {"-h", "--help"} & set(given):
        print(HELP)
        return 0
    try:
        measure(parse(given))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return MISTAKE
    except KeyboardInterrupt:
        print("interrupted: the workloads that were done are written", file=sys.stderr)
        return INTERRUPTED
    return 0


if __name__ == "__main__":
    sys.exit(main())
