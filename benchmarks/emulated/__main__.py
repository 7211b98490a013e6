"""Counts the operations of a private step on an emulated GPU:  python -m benchmarks.emulated model=gpt2 mode=all

It prints a line for each model, mode, layout and precision: operations, kernel launches, bytes. No GPU is needed. Mode
none is non-private training.
"""

import json
import sys
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.emulated import guard
from benchmarks.options import command, names, option


@dataclass
class Options:
    """The options of the command line."""

    model: str = option(
        "all", "wrn16_4_ws, wrn16_4_conv, roberta_base, gpt2, gpt2_untied, lora_gpt2; several separated by commas"
    )
    mode: str = option("all", "none, flat, ghost, fixed_layer, adaptive_layer; several separated by commas")
    layout: str = option("all", "contiguous, channels_last (only for images); several separated by commas")
    precision: str = option("all", "float32, bfloat16 (autocast); several separated by commas")
    batch: int | None = option(None, "examples in the batch; default: the model's usual batch on a GPU")
    layers: int | None = option(None, "transformer blocks; default: all")
    tiny: bool = option(False, "true: the smallest sizes, to test the command quickly")
    json: str | None = option(None, "also write the rows to this file")


def run(options: Options) -> None:
    """Emulate every case; print its line as soon as it is done."""
    guard.load()
    from benchmarks.emulated import step
    from benchmarks.emulated.device import Refused, Waits
    from benchmarks.workloads import WORKLOADS

    models = names("model", options.model, step.BATCHES)
    modes = names("mode", options.mode, step.MODES)
    layouts = names("layout", options.layout, ("contiguous", "channels_last"))
    precisions = names("precision", options.precision, ("float32", "bfloat16"))
    rows: list[dict[str, Any]] = []
    print(LINE.format(*HEAD), flush=True)
    for model, precision, layout, mode in product(models, precisions, layouts, modes):
        if layout == "channels_last" and not WORKLOADS[model].channels_last:
            continue
        case = step.Case(model, mode, layout, precision, options.batch, options.layers, options.tiny)
        try:
            row = step.run(case)
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


main = command(Options, run)

if __name__ == "__main__":
    sys.exit(main())
