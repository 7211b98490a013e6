"""Checks the memory planner of pipelines:  python -m benchmarks.pipeline shape=weights_2,full_4 method=none,device

It runs small pipelines of gloo processes on this machine, and compares the peak memory of each process during a step
with the prediction of `groupwise.planner`.

Shapes: weights_2, activations_2, rematerialized_4, full_4 (the digit is the number of processes).
Methods: none, device.
"""

import sys
from dataclasses import dataclass
from typing import Any

from benchmarks.options import command, names, option, out
from benchmarks.results import MACHINE, Table
from benchmarks.staged import PARTITIONS, SHAPES, Shape, Staged, measure

SIZES = ("stages", "rematerialize", "rank", "width", "blocks", "microbatch", "length", "microbatches")
SHOWN = ("shape", "stages", "method", "predicted_peak_bytes", "peak_bytes", "memory_error")
TABLE = Table("pipeline.csv", ("shape", "method", *MACHINE), SHOWN)


@dataclass
class PipelineOptions:
    """The options of the command line."""

    shape: str = option("all", "all, or some of them, separated by commas")
    method: str = option("all", "all, or some of them, separated by commas")
    out: str = out("pipeline.csv")
    tiny: bool = option(False, "true: the smallest sizes, to test the command quickly")


def compare(name: str, methods: list[str], options: PipelineOptions) -> list[dict[str, Any]]:
    """Rows of one shape: one for each method."""
    shape = SHAPES[name]
    if options.tiny:
        shape = Shape(2, 16, 2, 2, 8, 2, min(shape.rank, 2), 31, rematerialize=shape.rematerialize)
    staged = Staged(shape)
    print(f"{name}: predicting", file=sys.stderr, flush=True)
    predictions = {method: staged.predict(method) for method in methods}
    print(f"{name}: measuring in {shape.stages} processes", file=sys.stderr, flush=True)
    measured = measure(staged, methods)
    rows = []
    for method in methods:
        predicted, found = predictions[method], measured[method]
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


def run(options: PipelineOptions) -> None:
    """Predict and measure each shape; write and print its rows as soon as it is done."""
    methods = names("method", options.method, PARTITIONS)
    for name in names("shape", options.shape, SHAPES):
        TABLE.add(options.out, compare(name, methods, options))


main = command(PipelineOptions, run)

if __name__ == "__main__":
    sys.exit(main())
