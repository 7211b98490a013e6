"""Prints what a private step asks of a GPU, without one:  python -m benchmarks.emulated model=gpt2 mode=all

A model in a mode, layout and precision makes a line: operations, kernels started, bytes moved, beside non-private
training. `--help` lists the options.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.emulated import guard
from benchmarks.options import command, names, read

HELP = """python -m benchmarks.emulated [key=value ...]

  model=all        wrn16_4_ws, wrn16_4_conv, roberta_base, gpt2, gpt2_untied, lora_gpt2; several by commas
  mode=all         none, flat, ghost, fixed_layer, adaptive_layer; several by commas
  layout=all       contiguous, channels_last (images alone); several by commas
  precision=all    float32, bfloat16 (autocast)
  batch=16         default the model's own on a GPU
  layers=4         transformer blocks; default all
  tiny=false       true: the same layers at the smallest sizes
  json=FILE        write the rows there, too"""


@dataclass
class Options:
    """What the command line may say; see `HELP`."""

    model: str = "all"
    mode: str = "all"
    layout: str = "all"
    precision: str = "all"
    batch: int | None = None
    layers: int | None = None
    tiny: bool = False
    json: str | None = None


def run(arguments: Sequence[str]) -> None:
    """Emulate every case; a line each as soon as it is done."""
    options = read(Options, arguments)
    guard.load()
    from benchmarks.emulated.device import Refused, Waits
    from benchmarks.emulated.step import BATCHES, MODES, Case, run
    from benchmarks.workloads import WORKLOADS

    models = names("model", options.model, BATCHES)
    modes = names("mode", options.mode, MODES)
    layouts = names("layout", options.layout, ("contiguous", "channels_last"))
    precisions = names("precision", options.precision, ("float32", "bfloat16"))
    rows: list[dict[str, Any]] = []
    print(LINE.format(*HEAD), flush=True)
    for model, precision, layout, mode in product(models, precisions, layouts, modes):
        if layout == "channels_last" and not WORKLOADS[model].channels_last:
            continue
        case = Case(model, mode, layout, precision, options.batch, options.layers, options.tiny)
        try:
            row = run(case)
        except (Refused, Waits) as error:
            row = vars(case) | {"refused": str(error)}
        rows.append(row)
        print(_line(row), flush=True)
    if options.json:
        Path(options.json).write_text(json.dumps(rows, indent=1))


LINE = "{:13} {:15} {:13} {:9} {:>5} {:>11} {:>9} {:>8} {:>17} {}"
HEAD = ("model", "mode", "layout", "precision", "B", "operations", "launches", "GB", "release, update", "waits")


def _line(row: dict[str, Any]) -> str:
    first = (row["model"], row["mode"], row["layout"], row["precision"], row["batch"] or "")
    if "refused" in row:
        return LINE.format(*first, "refused:", "", "", "", row["refused"])
    rest = f"{row['rest_launches']} {row['rest_bytes'] / 1e9:.1f} GB"
    waits = ", ".join(f"{place} {n}" for place, n in row["waits"].items())
    return LINE.format(*first, row["operations"], row["launches"], f"{row['bytes'] / 1e9:.1f}", rest, waits)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns its exit code."""
    return command(run, HELP, "lines that were printed stand", arguments)


if __name__ == "__main__":
    sys.exit(main())
