"""Messages of a step whose tensors are cut, foretold and counted:  python -m benchmarks.tensor

A GPT-2 on two gloo processes of this machine, in each way to clip: how many messages one process sends in a step, and
how many bytes, beside what `groupwise.planner.parts` says beforehand; and the seconds of a step. `--help` lists the
options.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial

from benchmarks.cut_steps import CLIPPINGS, TensorOptions, foretold, measured
from benchmarks.options import check_above_zero, command, read
from groupwise.config.schema import RunConfig
from groupwise.processes.start import spawn

HELP = """python -m benchmarks.tensor [key=value ...]

  parts=2         processes
  layers=4        of the GPT-2
  width=256       of its activations; heads are 64 wide
  words=5000      in its vocabulary
  microbatch=4    examples at once
  microbatches=2  in a step
  length=64       tokens of an example
  steps=3         steps on the clock, after one to warm up; the fastest counts

  python -m benchmarks.tensor parts=4 width=512"""


def parse(arguments: Sequence[str]) -> TensorOptions:
    """Read and check the command line.

    Raises:
        UserError: an unknown key or value.
    """
    options = read(TensorOptions, arguments)
    check_above_zero(options, *vars(options))
    return options


def run(options: TensorOptions) -> None:
    """Measure, and print a table."""
    config = RunConfig()
    config.parallel.ranks, config.parallel.kind = options.parts, "tensor"
    found = spawn(config, partial(measured, options))
    plain = found["none"]["seconds"]
    heads = ("messages", "foretold", "norms", "MB", "foretold", "seconds", "to none")
    print("".join([f"{'clipping':10s}", *(f"{head:>10s}" for head in heads)]))
    for clipping in CLIPPINGS:
        row, said = found[clipping], foretold(options, clipping)
        norms = sum(said.norms.values())
        numbers = f"{row['messages']:10d}{said.messages:10d}{norms:10d}"
        sizes = f"{row['bytes'] / 1e6:10.3f}{said.traffic / 1e6:10.3f}"
        print(f"{clipping:10s}{numbers}{sizes}{row['seconds']:10.3f}{row['seconds'] / plain:10.2f}")


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns its exit code."""
    return command(lambda given: run(parse(given)), HELP, "nothing is written", arguments)


if __name__ == "__main__":
    sys.exit(main())
