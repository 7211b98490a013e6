"""Whole updates of the paper's language models at full size:  python -m benchmarks.full_size model=gpt2

The shapes come from their configurations, the weights are random. Each update has a process of its own, the private
ones beside the non-private one. `--help` lists the options.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.job import Job
from benchmarks.options import check_above_zero, check_device, command, names, read
from benchmarks.process import Process

if TYPE_CHECKING:
    from benchmarks.planned import Plan

GIB = 2**30
FILE = "full_size.csv"
KEY = ("model", "method", "batch", "tokens", "layers", "threads", "device", "hardware", "dtype")
COLUMNS = (
    *("model", "method", "batch", "tokens", "layers", "parameters", "trainable", "device", "hardware", "threads"),
    *("dtype", "cpu_seconds", "wall_seconds", "peak_bytes", "memory_ratio", "status"),
    *("commit", "dirty", "torch", "transformers", "python", "date"),
)
HELP = """python -m benchmarks.full_size [key=value ...]

One update (losses, clipped backward, thresholds, noise, AdamW) beside the non-private one: seconds and peak memory.

  model=all        roberta_base, gpt2, gpt2_xl (LoRA; frozen weights and autocast in bfloat16); several by commas
  batch=16         examples; default 16, of gpt2_xl 1
  tokens=128       of each example; default 128, of gpt2 100, of gpt2_xl 256
  layers=12        transformer blocks; default the model's own
  threads=1        threads of each process; processes run one at a time
  device=cpu       or cuda
  planned=false    true: bytes of weights, gradients, optimiser and activations, without an update (no rows are written)
  limit=1800       seconds for all that one process does; what takes longer is planned instead
  out=results/measured/benchmarks   the folder of full_size.csv
  tiny=false       true: the smallest sizes, to see that everything runs

  python -m benchmarks.full_size threads=2
  python -m benchmarks.full_size model=gpt2_xl planned=true"""


@dataclass(frozen=True)
class Full:
    """A model's workload, and how it is run unless told otherwise."""

    workload: str
    batch: int
    tokens: int
    layers: int
    dtype: str
    methods: tuple[str, ...]


MODELS = {
    "roberta_base": Full("roberta_base", 16, 128, 12, "float32", ("none", "adaptive_layer")),
    "gpt2": Full("gpt2", 16, 100, 12, "float32", ("none", "adaptive_layer")),
    "gpt2_xl": Full("lora_gpt2_xl", 1, 256, 48, "bfloat16", ("none", "flat", "adaptive_layer")),
}


@dataclass
class FullOptions:
    """What the command line may say; see `HELP`."""

    model: str = "all"
    batch: int | None = None
    tokens: int | None = None
    layers: int | None = None
    threads: int = 1
    device: str = "cpu"
    planned: bool = False
    limit: float = 1800.0
    out: str = "results/measured/benchmarks"
    tiny: bool = False

    @property
    def models(self) -> list[str]:
        """The names asked for."""
        return names("model", self.model, MODELS)


def parse(arguments: Sequence[str]) -> FullOptions:
    """Read and check the command line.

    Raises:
        UserError: an unknown key or value; more tokens than a model has positions.
    """
    from benchmarks import workloads

    options = read(FullOptions, arguments)
    check_above_zero(options, "threads", "limit")
    check_device(options.device)
    for name in options.models:
        workloads.check(MODELS[name].workload, batch=options.batch, layers=options.layers, tokens=options.tokens)
    return options


def job(name: str, method: str, options: FullOptions) -> Job:
    """What a process is to run; `tiny` leaves the sizes that were not given to the workload."""
    full = MODELS[name]
    return Job(
        full.workload,
        method,
        batch=options.batch or (None if options.tiny else full.batch),
        layers=options.layers or (None if options.tiny else full.layers),
        tokens=options.tokens or (None if options.tiny else full.tokens),
        device=options.device,
        dtype=full.dtype,
        threads=options.threads,
        tiny=options.tiny,
    )


def measure(name: str, options: FullOptions) -> list[dict[str, Any]]:
    """Rows of one model, without provenance: one for each method, `none` first."""
    rows: list[dict[str, Any]] = []
    for method in MODELS[name].methods:
        print(f"{name}: {method}", file=sys.stderr, flush=True)
        asked = job(name, method, options)
        with Process(asked, options.limit) as process:
            facts = process.ask(do="update")
        refused = facts.pop("refused", None)
        row = {
            "model": f"{name} (tiny)" if options.tiny else name,
            "method": method,
            **{size: getattr(asked, size) for size in ("batch", "tokens", "layers", "device", "threads", "dtype")},
            **facts,
            "status": f"refused: {refused}" if refused else "ok",
        }
        plain = (rows or [row])[0].get("peak_bytes")
        rows.append(row | {"memory_ratio": row["peak_bytes"] / plain if plain and not refused else None})
    return rows


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows of one model as lines of text."""
    first = next((row for row in rows if row["status"] == "ok"), rows[0])
    weights = "".join(f", {first.get(key, 0) / 1e6:.4g} M {key}" for key in ("parameters", "trainable"))
    lines = [
        f"\n{first['model']}: B {first['batch']}, T {first['tokens']}, {first['layers']} layers{weights}, "
        f"{first['device']}, {first['threads']} threads, {first['dtype']}",
        f"{'method':16s}{'seconds':>9s}{'of CPU':>9s}{'peak, GiB':>11s}{'of none':>9s}",
    ]
    for row in rows:
        if row["status"] != "ok":
            lines.append(f"{row['method']:16s}{row['status']}")
            continue
        ratio = "" if row["memory_ratio"] is None else f"{row['memory_ratio']:9.3f}"
        seconds = f"{row['wall_seconds']:9.2f}{row['cpu_seconds']:9.2f}"
        lines.append(f"{row['method']:16s}{seconds}{row['peak_bytes'] / GIB:11.3f}{ratio}".rstrip())
    return "\n".join(lines)


def planned_table(name: str, plan: Plan) -> str:
    """The parts of a plan as lines of text."""
    parts = {**vars(plan), "all": plan.total}
    return "\n".join(
        [f"\n{name}, planned, GiB", *(f"{key.replace('_', ' '):16s}{size / GIB:9.3f}" for key, size in parts.items())]
    )


def run(options: FullOptions) -> None:
    """Measure, or plan, each model; its rows are written and printed as soon as it is done."""
    from benchmarks.planned import plan
    from benchmarks.results import merge, provenance

    for name in options.models:
        rows = [] if options.planned else measure(name, options)
        if rows:
            source = provenance(options.device)
            merge(Path(options.out) / FILE, [row | source for row in rows], COLUMNS, KEY)
            print(table(rows), flush=True)
        if any(row["status"] != "ok" for row in rows) or options.planned:
            print(planned_table(name, plan(job(name, "none", options))), flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns its exit code."""
    return command(lambda given: run(parse(given)), HELP, "the models that were done are written", arguments)


if __name__ == "__main__":
    sys.exit(main())
