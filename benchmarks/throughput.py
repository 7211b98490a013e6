"""Speed and memory against non-private training:  python -m benchmarks.throughput workload=mlp method=all

Each method runs in a process of its own, in interleaved rounds. `--help` lists the options, `docs/benchmarks.md` says
how to read the results.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.options import HELP, Options, cases, command, parse


def measure(options: Options) -> None:
    """Run all cases; each case's rows are written, and its table printed, as soon as it is done."""
    from benchmarks.driver import progress, run
    from benchmarks.results import FILE, merge, provenance, table, with_ratios

    for case in cases(options):
        found = run(case, options.methods, options.rounds, options.steps, options.limit, progress)
        rows = [row | provenance(case.device) for row in with_ratios(found)]
        merge(Path(options.out) / FILE, rows)
        print(table(rows), flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns its exit code."""
    kept = "the workloads that were done are written"
    return command(lambda given: measure(parse(given)), HELP, kept, arguments)


if __name__ == "__main__":
    sys.exit(main())
