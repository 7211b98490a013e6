"""The pipeline planner against measurement:  python -m benchmarks.pipeline shape=weights_2

Small pipelines of gloo processes on this machine: the most memory that each process holds during a step, beside what
`groupwise.planner` says beforehand. `--help` lists the options.
"""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.options import command, names, read
from benchmarks.pipeline_shapes import SHAPES, Shape

MB = 1e6
FILE = "pipeline.csv"
KEY = ("shape", "method", "device", "hardware", "threads", "dtype")
SIZES = ("stages", "schedule", "rematerialize", "rank", "width", "blocks", "microbatch", "length", "microbatches")
COLUMNS = (
    *("shape", "method", *SIZES, "device", "hardware", "threads", "dtype"),
    *("predicted_peak_bytes", "peak_bytes", "memory_error"),
    *("commit", "dirty", "torch", "transformers", "python", "date"),
)
HELP = """python -m benchmarks.pipeline [key=value ...]

  shape=all        weights_2, activations_2, rematerialized_4, full_4 (the number: processes); several by commas
  method=all       none, device, layer, flat; several by commas
  out=results/measured/benchmarks   the folder of pipeline.csv
  tiny=false       true: the smallest sizes, to see that everything runs

  python -m benchmarks.pipeline shape=weights_2,full_4 method=none,device"""


METHODS = ("none", "device", "layer", "flat")


@dataclass
class PipelineOptions:
    """What the command line may say; see `HELP`."""

    shape: str = "all"
    method: str = "all"
    out: str = "results/measured/benchmarks"
    tiny: bool = False

    @property
    def shapes(self) -> list[str]:
        """The names asked for."""
        return names("shape", self.shape, SHAPES)

    @property
    def methods(self) -> list[str]:
        """The names asked for."""
        return names("method", self.method, METHODS)

    def sizes(self, name: str) -> Shape:
        """A shape's sizes."""
        if not self.tiny:
            return SHAPES[name]
        full = SHAPES[name]
        return Shape(2, 16, 2, 2, 8, 2, min(full.rank, 2), 31, full.schedule, full.rematerialize)


def parse(arguments: Sequence[str]) -> PipelineOptions:
    """Read and check the command line.

    Raises:
        UserError: an unknown key or value.
    """
    options = read(PipelineOptions, arguments)
    _ = options.shapes, options.methods
    return options


def compare(name: str, options: PipelineOptions) -> list[dict[str, Any]]:
    """Rows of one shape, without provenance: one for each method."""
    from benchmarks.staged import Staged, measure

    shape = options.sizes(name)
    staged = Staged(shape)
    print(f"{name}: the planner", file=sys.stderr, flush=True)
    foretold = {method: staged.predict(method) for method in options.methods}
    print(f"{name}: {shape.stages} processes", file=sys.stderr, flush=True)
    measured = measure(staged, options.methods)
    rows = []
    for method in options.methods:
        predicted, found = foretold[method], measured[method]
        row = {
            "shape": f"{name} (tiny)" if options.tiny else name,
            "method": method,
            **{size: getattr(shape, size) for size in SIZES},
            "device": "cpu",
            "threads": 1,
            "dtype": "float32",
            "predicted_peak_bytes": max(predicted),
            "peak_bytes": max(found),
            "memory_error": max((p / m - 1 for p, m in zip(predicted, found, strict=True)), key=abs),
        }
        rows.append(row)
    return rows


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows of one shape as lines of text."""
    first = rows[0]
    sizes = ", ".join(f"{size} {first[size]}" for size in SIZES)
    lines = [
        f"\n{first['shape']}: {sizes}",
        f"{'':8s}{'fullest stage, MB':>25s}{'worst':>9s}",
        f"{'method':8s}{'predicted':>14s}{'measured':>11s}{'stage':>9s}",
    ]
    for row in rows:
        memory = f"{row['predicted_peak_bytes'] / MB:14.2f}{row['peak_bytes'] / MB:11.2f}{row['memory_error']:+9.1%}"
        lines.append(f"{row['method']:8s}{memory}")
    return "\n".join(lines)


def run(options: PipelineOptions) -> None:
    """Predict and measure each shape; its rows are written and printed as soon as it is done."""
    from benchmarks.results import merge, provenance

    source = provenance("cpu")
    for name in options.shapes:
        rows = compare(name, options)
        merge(Path(options.out) / FILE, [row | source for row in rows], COLUMNS, KEY)
        print(table(rows), flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns its exit code."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "9")  # else torch's profiler, which measures memory, talks
    return command(lambda given: run(parse(given)), HELP, "the shapes that were done are written", arguments)


if __name__ == "__main__":
    sys.exit(main())
