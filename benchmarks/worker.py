"""The process of one method:  python -m benchmarks.worker '{"workload": "mlp", "method": "flat"}'

It reads requests as lines of JSON on stdin and answers each with one on stdout:

- ``{"do": "measure"}`` -> peak_bytes, operations, seconds (of one step), sums (norm of the sums), parameters, …
- ``{"do": "round", "steps": 3}`` -> cpu_seconds, wall_seconds, noise_seconds, each of one step
- anything that fails -> ``{"refused": "the first line of what it said"}``
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
import warnings
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.floor import count_operations
from benchmarks.job import Job
from benchmarks.memory import Step, peak_bytes
from benchmarks.methods import Method, make
from benchmarks.workloads import Workload, build


@dataclass(frozen=True)
class Seconds:
    """CPU time of the process; wall time, on a GPU between two of its events."""

    cpu: float
    wall: float


class Bench:
    """A job, built when it is first needed."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self._built: tuple[Workload, Method] | None = None

    def measure(self) -> dict[str, Any]:
        """Memory first, then what a profiler would disturb."""
        peak, step = peak_bytes(lambda: self._get()[1].step, self.job.device)
        workload, method = self._get()
        sums = sum(float(p.grad.double().square().sum()) for p in workload.trainable if p.grad is not None) ** 0.5
        seconds = self._time(step, 1)
        try:
            operations = count_operations(step)
        except Exception:  # the counter cannot follow everything that a peer does; the method itself runs
            operations = None
        method.clear()
        return {
            "peak_bytes": peak,
            "flops": operations,
            "seconds": seconds.wall if self.job.device == "cuda" else seconds.cpu,
            "sums": sums,
            "parameters": sum(p.numel() for p in workload.trainable),
            "batch": workload.batch,
            "layers": workload.layers,
        }

    def round(self, steps: int) -> dict[str, Any]:
        """One step to warm up, its noise, then `steps` steps on the clock."""
        _, method = self._get()
        method.step()
        noise = self._time(method.noise, 1)
        taken = self._time(method.step, steps)
        method.clear()
        gc.collect()
        if self.job.device == "cuda":
            torch.cuda.empty_cache()
        return {
            "cpu_seconds": taken.cpu,
            "wall_seconds": taken.wall,
            "noise_seconds": noise.wall if self.job.device == "cuda" else noise.cpu,
        }

    def _get(self) -> tuple[Workload, Method]:
        if self._built is None:
            job = self.job
            workload = build(
                job.workload,
                batch=job.batch,
                layers=job.layers,
                tiny=job.tiny,
                device=job.device,
                dtype=job.dtype,
                channels_last=job.memory_format == "channels_last",
            )
            self._built = workload, make(job.method, workload)
        return self._built

    def _time(self, step: Step, steps: int) -> Seconds:
        """Seconds a step."""
        if self.job.device != "cuda":
            cpu, wall = time.process_time(), time.perf_counter()
            for _ in range(steps):
                step()
            return Seconds((time.process_time() - cpu) / steps, (time.perf_counter() - wall) / steps)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        cpu = time.process_time()
        begin.record()
        for _ in range(steps):
            step()
        end.record()
        torch.cuda.synchronize()
        return Seconds((time.process_time() - cpu) / steps, begin.elapsed_time(end) / 1000 / steps)


def answer(bench: Bench, request: dict[str, Any]) -> dict[str, Any]:
    """Do what was asked; whatever is raised becomes an answer, as a peer may refuse in any way."""
    try:
        return bench.measure() if request["do"] == "measure" else bench.round(request["steps"])
    except (MemoryError, torch.OutOfMemoryError):
        return {"refused": "out of memory"}
    except Exception as error:
        first = next(iter(str(error).strip().splitlines()), "")
        if "DefaultCPUAllocator" in str(error):
            return {"refused": "out of memory"}
        return {"refused": first or type(error).__name__}


def main() -> None:
    """Answer until stdin ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print must not get between the answers
    warnings.simplefilter("ignore")
    job = Job.load(sys.argv[1])
    torch.set_num_threads(job.threads)
    bench = Bench(job)
    for line in sys.stdin:
        answers.write(json.dumps(answer(bench, json.loads(line))) + "\n")


if __name__ == "__main__":
    main()
