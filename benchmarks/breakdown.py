"""Measures where time goes:  python -m benchmarks.breakdown workload=roberta_base method=adaptive_layer

One process, plain training first and then each method; self time of every operation, in milliseconds a step. Profiling
costs time of its own, most where operations are small: this says what is slow, `benchmarks.throughput` how slow.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from benchmarks.options import cases, command, parse

if TYPE_CHECKING:
    from benchmarks.options import Options

ROWS = 24
HELP = """python -m benchmarks.breakdown [key=value ...]

  The keys of benchmarks.throughput that say what runs: workload, method, batch, layers, steps, threads, device, dtype,
  tiny. The default is every workload and method: name one of each.

  python -m benchmarks.breakdown workload=roberta_base method=adaptive_layer steps=4"""


def breakdown(options: Options) -> dict[str, dict[str, dict[str, float]]]:
    """Milliseconds a step: workload -> method -> operation -> self time."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    from benchmarks.methods import formats, prepare
    from benchmarks.workloads import WORKLOADS

    torch.set_num_threads(options.threads)
    on_gpu = options.device == "cuda"
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if on_gpu else [])
    found: dict[str, dict[str, dict[str, float]]] = {}
    for case in cases(options):
        (ours,) = formats("adaptive_layer", WORKLOADS[case.workload].channels_last)
        for name in options.methods:
            _, method = prepare(replace(case, method=name, memory_format=ours))
            for _ in range(2):
                method.step()
            with profile(activities=activities) as profiler:
                for _ in range(options.steps):
                    method.step()
            found.setdefault(case.workload, {})[name] = {
                event.key: (event.self_device_time_total if on_gpu else event.self_cpu_time_total) / 1e3 / options.steps
                for event in profiler.key_averages()
            }
    return found


def table(times: dict[str, dict[str, float]]) -> str:
    """The slowest operations, one column a method."""
    operations = sorted({key for each in times.values() for key in each}, key=lambda key: -_most(times, key))[:ROWS]
    lines = [f"{'ms a step':44s}" + "".join(f"{name:>18s}" for name in times)]
    lines += [f"{'all':44s}" + "".join(f"{sum(each.values()):18.2f}" for each in times.values())]
    lines += [f"{key[:43]:44s}" + "".join(f"{each.get(key, 0):18.2f}" for each in times.values()) for key in operations]
    return "\n".join(lines)


def _most(times: dict[str, dict[str, float]], key: str) -> float:
    return max(each.get(key, 0.0) for each in times.values())


def _run(arguments: list[str]) -> None:
    for workload, times in breakdown(parse(arguments)).items():
        print(f"{workload}\n{table(times)}", flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns its exit code."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "9")  # else torch's profiler talks
    return command(_run, HELP, "what is printed is done", arguments)


if __name__ == "__main__":
    sys.exit(main())
