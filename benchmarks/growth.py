"""Measures what doubling a size costs:  python -m benchmarks.growth network=transformer axis=length

Step time and peak memory as batch, sequence length, width and number of layers double, beside non-private training.
`--help` lists the options.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.options import check_above_zero, check_device, command, read
from groupwise.errors import UserError

if TYPE_CHECKING:
    from benchmarks.growing import GrowthOptions

FILE = "growth.csv"
KEY = ("network", "axis", "method", "threads", "device", "hardware", "dtype")  # all sizes of an axis are replaced
COLUMNS = (
    *("network", "axis", "value", "method", "batch", "length", "width", "layers", "parameters"),
    *("device", "hardware", "threads", "dtype", "round", "steps", "cpu_seconds", "wall_seconds", "peak_bytes"),
    *("status", "commit", "dirty", "torch", "python", "date"),
)
HELP = """python -m benchmarks.growth [key=value ...]

  network=all      transformer, conv; several by commas
  axis=all         batch, length, width, layers (conv: no length); several by commas
  method=none,adaptive_layer,flat,ghost
  doublings=4      of each size, from the network's own
  rounds=5         how often each method has its turn at each size
  steps=2          steps on the clock in a turn, after one to warm up
  threads=1        of torch
  device=cpu       or cuda
  dtype=float32    or bfloat16 (autocast)
  limit=20         seconds: an axis ends before a step would take longer
  out=results/measured/benchmarks   the folder of growth.csv"""


def parse(arguments: Sequence[str]) -> GrowthOptions:
    """Read and check the command line.

    Raises:
        UserError: an unknown key or value, an axis that a network has not, an absent GPU.
    """
    from benchmarks import methods
    from benchmarks.growing import NETWORKS, GrowthOptions

    options = read(GrowthOptions, arguments)
    check_above_zero(options, "doublings", "rounds", "steps", "threads", "limit")
    for name in options.methods:
        methods.check(name)
    for network, axis in options.cases:
        if axis not in NETWORKS[network].axes:
            raise UserError(f"axis={axis} is none of network={network}: give {', '.join(NETWORKS[network].axes)}.")
    if options.dtype not in ("float32", "bfloat16"):
        raise UserError(f"dtype={options.dtype} is unknown: give float32 or bfloat16.")
    check_device(options.device)
    return options


def run(options: GrowthOptions) -> None:
    """Measure every axis; its rows are written and its factors printed as soon as it is done."""
    from benchmarks.growing import measure, summary
    from benchmarks.results import merge, provenance

    path = Path(options.out) / FILE
    source = provenance(options.device)
    for network, axis in options.cases:
        rows = measure(network, axis, options)
        merge(path, [row | source for row in rows], COLUMNS, KEY)
        print(summary(rows), flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns its exit code."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "9")  # else torch's profiler, which measures memory, talks
    return command(lambda given: run(parse(given)), HELP, "the axes that were done are written", arguments)


if __name__ == "__main__":
    sys.exit(main())
