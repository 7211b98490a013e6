"""The pipeline planner against measurement:  python -m benchmarks.pipeline shape=weights_2

Small pipelines of gloo processes on this machine: the most memory that each process holds during a step, and the step's
time, beside what `groupwise.planner` says beforehand. CPU seconds are those of all processes together. The wall
time is foretold for as many processors as other programs left to them. `--help` lists the options.
"""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.options import check_above_zero, command, names, read
from benchmarks.pipeline_shapes import SHAPES, Shape

MB = 1e6
FILE = "pipeline.csv"
KEY = ("shape", "method", "device", "hardware", "threads", "cores", "dtype")
SIZES = ("stages", "schedule", "rematerialize", "rank", "width", "blocks", "microbatch", "length", "microbatches")
MEASURED = ("peak_bytes", "wall_seconds", "cpu_seconds")
PREDICTED = tuple(f"predicted_{name}" for name in MEASURED)
COLUMNS = (
    *("shape", "method", *SIZES, "device", "hardware", "threads", "cores", "dtype"),
    *(*PREDICTED, *MEASURED, "memory_error", "wall_error", "cpu_error", "cores_left"),
    *("commit", "dirty", "torch", "transformers", "python", "date"),
)
HELP = """python -m benchmarks.pipeline [key=value ...]

  shape=all        weights_2, activations_2, rematerialized_4, full_4 (the number: processes); several by commas
  method=all       none, device, layer, flat; several by commas
  steps=3          steps on the clock, after one to warm up; the fastest counts
  cores=2          processors that the processes share; default this machine's
  out=results/measured/benchmarks   the folder of pipeline.csv
  tiny=false       true: the smallest sizes, to see that everything runs

  python -m benchmarks.pipeline shape=weights_2,full_4 method=none,device"""


METHODS = ("none", "device", "layer", "flat")


@dataclass
class PipelineOptions:
    """What the command line may say; see `HELP`."""

    shape: str = "all"
    method: str = "all"
    steps: int = 3
    cores: int | None = None
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
    check_above_zero(options, "steps")
    if options.cores is not None:
        check_above_zero(options, "cores")
    _ = options.shapes, options.methods
    return options


def compare(name: str, options: PipelineOptions) -> list[dict[str, Any]]:
    """Rows of one shape, without provenance: one for each method."""
    from benchmarks.staged import Staged, measure

    shape = options.sizes(name)
    staged = Staged(shape, options.cores or os.cpu_count() or 1)
    print(f"{name}: the planner", file=sys.stderr, flush=True)
    foretold = {method: staged.predict(method) for method in options.methods}
    print(f"{name}: {shape.stages} processes", file=sys.stderr, flush=True)
    measured = measure(staged, options.methods, options.steps)
    rows = []
    for method in options.methods:
        predicted, found = foretold[method], measured[method]
        wall = predicted.wall(found.cores)
        row = {
            "shape": f"{name} (tiny)" if options.tiny else name,
            "method": method,
            **{size: getattr(shape, size) for size in SIZES},
            "device": "cpu",
            "threads": 1,
            "cores": staged.cores,
            "dtype": "float32",
            "predicted_peak_bytes": max(predicted.peaks),
            "predicted_wall_seconds": wall,
            "predicted_cpu_seconds": sum(predicted.cpu),
            "peak_bytes": max(found.peaks),
            "wall_seconds": found.wall,
            "cpu_seconds": sum(found.cpu),
            "memory_error": max((p / m - 1 for p, m in zip(predicted.peaks, found.peaks, strict=True)), key=abs),
            "wall_error": wall / found.wall - 1,
            "cpu_error": sum(predicted.cpu) / sum(found.cpu) - 1,
            "cores_left": found.cores,
        }
        rows.append(row)
    return rows


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows of one shape as lines of text."""
    first = rows[0]
    sizes = ", ".join(f"{size} {first[size]}" for size in SIZES)
    clocks = f"{'pred.':>9s}{'meas.':>8s}{'error':>9s}"
    lines = [
        f"\n{first['shape']}: {sizes}, {first['cores']} cores",
        f"{'':8s}{'fullest stage, MB':>25s}{'worst':>9s}{'wall, s':>17s}{'':9s}{'CPU, s':>17s}",
        f"{'method':8s}{'predicted':>14s}{'measured':>11s}{'stage':>9s}{clocks}{clocks}  cores",
    ]
    for row in rows:
        memory = f"{row['predicted_peak_bytes'] / MB:14.2f}{row['peak_bytes'] / MB:11.2f}{row['memory_error']:+9.1%}"
        times = "".join(
            f"{row[f'predicted_{clock}_seconds']:9.3f}{row[f'{clock}_seconds']:8.3f}{row[f'{clock}_error']:+9.1%}"
            for clock in ("wall", "cpu")
        )
        lines.append(f"{row['method']:8s}{memory}{times}{row['cores_left']:7.2f}")
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
