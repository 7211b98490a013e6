"""Measures one method on one workload, and answers requests:

- ``{"do": "measure"}`` -> peak_bytes, operations, seconds (of one step), sums (their norm), parameters, …
- ``{"do": "round", "steps": 3}`` -> cpu_seconds, wall_seconds, noise_seconds, each of one step
- after an error: ``{"refused": "the first line of its message"}``
"""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.job import Job
from benchmarks.meters import count_operations, free_memory, peak_bytes, timed
from benchmarks.methods import RECORDED, Method, prepare
from benchmarks.research_peers import version_of
from benchmarks.workloads import Workload


class Bench:
    """Runs a job; the model is built at the first request."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self._built: tuple[Workload, Method] | None = None

    def measure(self) -> dict[str, Any]:
        """Measure memory, then time without the profiler, which would disturb it."""
        peak, step = peak_bytes(lambda: self._get()[1].step, self.job.device)
        workload, method = self._get()
        sums = sum(float(p.grad.double().square().sum()) for p in workload.trainable if p.grad is not None) ** 0.5
        seconds = timed(step, 1, self.job.device)
        try:
            operations = count_operations(step)
        except Exception:  # the counter does not know every operation of a peer
            operations = None
        method.clear()
        return {
            "peak_bytes": None if self.job.method in RECORDED else peak,  # without the memory of a graph
            "flops": operations,
            "seconds": seconds.wall if self.job.device == "cuda" else seconds.cpu,
            "sums": sums,
            "parameters": sum(p.numel() for p in workload.trainable),
            "batch": workload.batch,
            "layers": workload.layers,
            "peer": version_of(self.job.method),
        }

    def round(self, steps: int) -> dict[str, Any]:
        """Take one warm-up step, time its noise, then time `steps` steps."""
        _, method = self._get()
        method.step()
        noise = timed(method.noise, 1, self.job.device)
        taken = timed(method.step, steps, self.job.device)
        method.clear()
        free_memory(self.job.device)
        return {
            "cpu_seconds": taken.cpu,
            "wall_seconds": taken.wall,
            "noise_seconds": noise.wall if self.job.device == "cuda" else noise.cpu,
        }

    def _get(self) -> tuple[Workload, Method]:
        if self._built is None:
            self._built = prepare(self.job)
        return self._built


def answer(bench: Bench, request: dict[str, Any]) -> dict[str, Any]:
    """Answer a request; any exception becomes an answer, as other libraries raise many kinds."""
    try:
        return bench.measure() if request["do"] == "measure" else bench.round(request["steps"])
    except (MemoryError, torch.OutOfMemoryError):
        return {"refused": "out of memory"}
    except Exception as error:
        first = next(iter(str(error).strip().splitlines()), "")
        if "DefaultCPUAllocator" in str(error):
            return {"refused": "out of memory"}
        return {"refused": first or type(error).__name__}


class DeviceLost(Exception):
    """A kernel of `method` failed, and this process cannot use its GPU any more."""

    def __init__(self, method: str, why: str) -> None:
        super().__init__(why)
        self.method = method


def is_lost(device: str) -> bool:
    """Whether an earlier kernel broke the GPU for this process."""
    try:
        if device == "cuda":
            torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


class Together:
    """Replaces `benchmarks.process.Process` within this process; it frees unused memory before each request.

    Raises:
        DeviceLost: a request broke the GPU.
    """

    def __init__(self, job: Job, limit: float) -> None:
        self.job = job
        self._bench: Bench | None = Bench(job)
        torch.set_num_threads(job.threads)

    def ask(self, **request: Any) -> dict[str, Any]:
        """Answer a request; failures are answers too. There is no time limit: only a process can be killed."""
        assert self._bench is not None
        free_memory(self.job.device)
        found = answer(self._bench, request)
        if self.job.device == "cuda":
            try:
                torch.cuda.synchronize()
            except RuntimeError as error:
                raise DeviceLost(self.job.method, found.get("refused") or str(error).splitlines()[0]) from error
        return found

    def close(self) -> None:
        """Free the model."""
        self._bench = None
        free_memory(self.job.device, workspaces=True)

    def __enter__(self) -> Together:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not DeviceLost:
            self.close()
