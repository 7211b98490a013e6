"""Measures where time goes:  python -m benchmarks.breakdown workload=roberta_base method=adaptive_layer

One process, milliseconds a step. First the budget of each way of ours: its layers one by one beside plain training and
beside what the operations counted would allow, and what a step takes outside of them. Then the self time of every
operation. Profiling costs time of its own, most where operations are small: this says what is slow,
`benchmarks.throughput` how slow.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from benchmarks.options import cases, command, parse

if TYPE_CHECKING:
    from benchmarks.job import Job
    from benchmarks.layer_costs import Costs
    from benchmarks.options import Options
    from benchmarks.workloads import Workload

ROWS = 24
HELP = """python -m benchmarks.breakdown [key=value ...]

  The keys of benchmarks.throughput that say what runs: workload, method, batch, layers, rounds, steps, threads, device,
  dtype, tiny. The default is every workload and method: name one of each.

  python -m benchmarks.breakdown workload=roberta_base method=adaptive_layer rounds=7"""


def budget(costs: Costs, method: str) -> str:
    """What each kind of layer and each other part of a step takes, and how much of it is beyond its floor."""
    lines = [f"{'ms a step, ' + method:60s}{'layers':>8s}{'plain':>10s}{'private':>10s}{'floor':>10s}{'over':>10s}"]
    for part in [*costs.layers, costs.outside, costs.step, *costs.once]:
        numbers = (part.plain, part.private, part.floor, part.private - part.floor)
        count = f"{part.count or '':>8}"
        lines.append(f"{part.name[:59]:60s}{count}" + "".join(f"{number:10.2f}" for number in numbers))
    plain, ratios = costs.step.plain, (costs.step.private, costs.step.floor)
    lines.append(f"{'ratio of a step to plain training':78s}" + "".join(f"{plain / ms:10.3f}" for ms in ratios))
    return "\n".join(lines)


def operations(case: Job, options: Options) -> dict[str, dict[str, float]]:
    """Milliseconds a step: method -> operation -> self time."""
    from torch.profiler import ProfilerActivity, profile

    from benchmarks.methods import prepare

    on_gpu = options.device == "cuda"
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if on_gpu else [])
    found = {}
    for name in options.methods:
        _, method = prepare(replace(case, method=name))
        for _ in range(2):
            method.step()
        with profile(activities=activities) as profiler:
            for _ in range(options.steps):
                method.step()
        found[name] = {
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


def _workload(case: Job) -> Workload:
    from benchmarks.methods import prepare

    return prepare(case)[0]


def _run(arguments: list[str]) -> None:
    options = parse(arguments)
    import torch

    from benchmarks.layer_costs import costs
    from benchmarks.methods import formats, is_ours
    from benchmarks.workloads import WORKLOADS
    from groupwise.training.memory import keep_freed_blocks

    torch.set_num_threads(options.threads)
    keep_freed_blocks()  # as a run does
    for asked in cases(options):
        (ours,) = formats("adaptive_layer", WORKLOADS[asked.workload].channels_last)
        case = replace(asked, memory_format=ours)
        print(case.named)
        for name in options.methods:
            if is_ours(name):
                measured = costs(partial(_workload, case), name, options.rounds, options.device)
                print(f"{budget(measured, name)}\n", flush=True)
        print(table(operations(case, options)), flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns its exit code."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "9")  # else torch's profiler talks
    return command(_run, HELP, "what is printed is done", arguments)


if __name__ == "__main__":
    sys.exit(main())
