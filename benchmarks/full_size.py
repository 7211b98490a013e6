"""Whole updates of the paper's language models at full size:  python -m benchmarks.full_size model=gpt2

One update (losses, clipped backward, thresholds, noise, AdamW) beside the non-private one: seconds and peak memory. The
shapes come from the models' configurations, the weights are random. Each update has a process of its own.

Models: roberta_base, gpt2, gpt2_xl (LoRA; frozen weights and autocast in bfloat16).
"""

import sys
from dataclasses import dataclass
from typing import Any

from benchmarks.job import Job
from benchmarks.options import command, device, names, option, out
from benchmarks.process import Process
from benchmarks.results import MACHINE, Table

SIZES = ("batch", "tokens", "layers")
TABLE = Table(
    "full_size.csv",
    ("model", "method", *SIZES, *MACHINE),
    ("model", *SIZES, "dtype", "method", "wall_seconds", "cpu_seconds", "peak_bytes", "memory_ratio", "status"),
)


@dataclass(frozen=True)
class Full:
    """A model's workload, and how it is run by default."""

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
    """What the command line may say."""

    model: str = option("all", "several by commas")
    batch: int | None = option(None, "examples; default 16, of gpt2_xl 1")
    tokens: int | None = option(None, "of each example; default 128, of gpt2 100, of gpt2_xl 256")
    layers: int | None = option(None, "transformer blocks; default the model's own")
    threads: int = option(1, "threads of each process; processes run one at a time")
    device: str = device("cpu")
    limit: float = option(1800.0, "seconds for all that one process does")
    out: str = out("full_size.csv")
    tiny: bool = option(False, "true: the smallest sizes, to see that everything runs")


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
    """Rows of one model: one for each method, `none` first."""
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
            **{size: getattr(asked, size) for size in (*SIZES, "device", "threads", "dtype")},
            **facts,
            "status": f"refused: {refused}" if refused else "ok",
        }
        plain = (rows or [row])[0].get("peak_bytes")
        rows.append(row | {"memory_ratio": row["peak_bytes"] / plain if plain and not refused else None})
    return rows


def run(options: FullOptions) -> None:
    """Measure each model; its rows are written and printed as soon as it is done."""
    for name in names("model", options.model, MODELS):
        TABLE.add(options.out, measure(name, options))


main = command(FullOptions, run)

if __name__ == "__main__":
    sys.exit(main())
