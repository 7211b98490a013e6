"""One axis of the growth benchmark: at each size the memory of every method, then all methods in interleaved rounds."""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence
from typing import Any

import pandas as pd
import torch

from benchmarks.growing import NETWORKS, Sizes, build
from benchmarks.memory import peak_bytes
from benchmarks.methods import Method, make
from benchmarks.options import GrowthOptions
from benchmarks.stopwatch import Seconds, Stopwatch
from groupwise.analysis.benchmark_rows import METHODS, growth_factors, in_order


def measure(network: str, axis: str, options: GrowthOptions) -> list[dict[str, Any]]:
    """Rows of one axis, without provenance: one for each size, method and round.

    It ends early where the next doubling of the slowest method would take more than `options.limit` seconds a step, if
    time grew there as it last did.
    """
    torch.set_num_threads(options.threads)
    rows: list[dict[str, Any]] = []
    slowest: list[float] = []
    for doubling in range(options.doublings + 1):
        if slowest and slowest[-1] * (slowest[-1] / slowest[-2] if len(slowest) > 1 else 2.0) > options.limit:
            print(f"{network}: {axis} ends here, a step would take more than {options.limit:g} s", file=sys.stderr)
            break
        sizes = NETWORKS[network].start.grown(axis, doubling)
        print(f"{network}: {axis} {getattr(sizes, axis)}", file=sys.stderr, flush=True)
        found = _measure(network, sizes, options)
        slowest.append(max(_counting(row, options.device) for row in found))
        rows += [{"axis": axis, "value": getattr(sizes, axis), **row} for row in found]
    return rows


def _measure(network: str, sizes: Sizes, options: GrowthOptions) -> list[dict[str, Any]]:
    peaks = {method: _peak(method, network, sizes, options) for method in options.methods}
    running: dict[str, tuple[Method, int]] = {}
    for method in options.methods:
        workload = build(network, sizes, device=options.device, dtype=options.dtype)
        running[method] = make(method, workload), sum(p.numel() for p in workload.model.parameters())
    rows = []
    for number in range(options.rounds):
        for method, (way, parameters) in running.items():
            taken = _time(way, options)
            rows.append(
                {
                    "network": network,
                    "method": method,
                    **vars(sizes),
                    "parameters": parameters,
                    "device": options.device,
                    "threads": options.threads,
                    "dtype": options.dtype,
                    "round": number,
                    "steps": options.steps,
                    "cpu_seconds": taken.cpu,
                    "wall_seconds": taken.wall,
                    "peak_bytes": peaks[method],
                    "status": "ok",
                }
            )
    return rows


def _peak(method: str, network: str, sizes: Sizes, options: GrowthOptions) -> int:
    gc.collect()  # what is freed in between must not count

    def step() -> Any:
        return make(method, build(network, sizes, device=options.device, dtype=options.dtype)).step

    return peak_bytes(step, options.device)[0]


def _time(method: Method, options: GrowthOptions) -> Seconds:
    method.step()
    watch = Stopwatch(options.device)
    for _ in range(options.steps):
        method.step()
    seconds = watch.read(options.steps)
    method.clear()
    return seconds


def _counting(row: dict[str, Any], device: str) -> float:
    return row["wall_seconds"] if device == "cuda" else row["cpu_seconds"]


def summary(rows: Sequence[dict[str, Any]]) -> str:
    """What the command prints of one axis: the factors of each doubling, those of non-private training beside them."""
    table = growth_factors(pd.DataFrame(list(rows)))
    lines = [f"\n{rows[0]['network']}, {rows[0]['axis']}: time (none's), memory (none's)"]
    for method in in_order(table["method"].unique()):
        for step in table[table["method"] == method].itertuples():
            lines.append(
                f"  {METHODS.get(method, method):20} {step.start:>5g} to {step.end:<5g} "
                f"{step.time:5.2f} ({step.none_time:.2f})  {step.memory:5.2f} ({step.none_memory:.2f})"
            )
    return "\n".join(lines)
