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
from benchmarks.options import command, read, split
from groupwise.errors import UserError, did_you_mean

HELP = """python -m benchmarks.emulated [key=value ...]

  model=all        wrn16_4_ws, wrn16_4_conv, roberta_base, gpt2, gpt2_untied, lora_gpt2; several by commas
  mode=all         none, flat, ghost, fixed_layer, adaptive_layer; several by commas
  layout=all       contiguous, channels_last (images alone); several by commas
  precision=all    float32, bfloat16 (autocast)
  batch=16         default the model's own on a GPU
  layers=4         transformer blocks; default all
  tiny=false       true: the same layers at the smallest sizes
  places=0         show the so many lines of code that move the most bytes, and that start the most kernels
  parts=false      true: kernels and bytes by the part of the step and the kind of layer
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
    places: int = 0
    parts: bool = False
    json: str | None = None


def run(arguments: Sequence[str]) -> None:
    """Emulate every case; a line each as soon as it is done."""
    options = read(Options, arguments)
    guard.load()
    from benchmarks.emulated.device import Refused, Waits
    from benchmarks.emulated.parts import table
    from benchmarks.emulated.step import BATCHES, MODES, Case, run
    from benchmarks.workloads import WORKLOADS

    models = _names(options.model, "model", tuple(BATCHES))
    modes = _names(options.mode, "mode", MODES)
    layouts = _names(options.layout, "layout", ("contiguous", "channels_last"))
    precisions = _names(options.precision, "precision", ("float32", "bfloat16"))
    rows: list[dict[str, Any]] = []
    print(LINE.format(*HEAD), flush=True)
    for model, precision, layout, mode in product(models, precisions, layouts, modes):
        if layout == "channels_last" and not WORKLOADS[model].channels_last:
            continue
        case = Case(model, mode, layout, precision, options.batch, options.layers, options.tiny)
        try:
            row, gpu = run(case, options.places > 0 or options.parts)
        except (Refused, Waits) as error:
            row, gpu = vars(case) | {"refused": str(error)}, None
        rows.append(row)
        print(_line(row), flush=True)
        if gpu is not None and options.parts:
            print(*table(gpu.parts, gpu.bytes_of), sep="\n", flush=True)
        if gpu is not None and options.places:
            print(*_places(gpu, options.places), sep="\n", flush=True)
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


def _places(gpu: Any, many: int) -> list[str]:
    moved = [
        f"    {count / 1e9:8.2f} GB {gpu.places[place]:6}  {place}" for place, count in gpu.bytes_at.most_common(many)
    ]
    often = [f"    {count:6} kernels  {place}" for place, count in gpu.places.most_common(many)]
    return [*moved, "", *often]


def _names(given: str, key: str, known: tuple[str, ...]) -> list[str]:
    names = list(known) if given == "all" else split(given)
    for name in names:
        if name not in known:
            raise UserError(f"{key}={name} is unknown{did_you_mean(name, known)}: give {', '.join(known)}.")
    return names


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns its exit code."""
    return command(run, HELP, "lines that were printed stand", arguments)


if __name__ == "__main__":
    sys.exit(main())
