"""Measures one method on one workload, and answers requests with what it found:

- ``ask("measure")`` -> peak_bytes, operations, seconds (of one step), sums (norm of the sums), parameters, …
- ``ask("round", steps=3)`` -> cpu_seconds, wall_seconds, noise_seconds, each of one step
- ``ask("update")`` -> peak_bytes, cpu_seconds, wall_seconds of one step with its noise and an optimiser's update
- anything that fails -> ``{"refused": "the first line of what it said"}``
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from benchmarks.job import Job
from benchmarks.meters import Seconds, Step, Stopwatch, count_operations, peak_bytes
from benchmarks.methods import Method, prepare
from benchmarks.workloads import Workload
from groupwise.training.arithmetic import arithmetic
from groupwise.training.memory import is_oom, keep_freed_blocks

LEARNING_RATE = 1e-4  # of `update`, where nothing is learned


class Worker:
    """A job, built when it is first needed, and a context manager: at its end the model is forgotten.

    Many can be there at once, and a GPU's memory is given back.

    Raises:
        DeviceLost: at the question that broke the GPU.
    """

    def __init__(self, job: Job) -> None:
        self.job = job
        self._built: tuple[Workload, Method] | None = None
        torch.set_num_threads(job.threads)

    def ask(self, do: str, **given: Any) -> dict[str, Any]:
        """Do what was asked; whatever is raised becomes an answer, as a peer may refuse in any way."""
        self._tidy()
        try:
            found = {"measure": self.measure, "round": self.round, "update": self.update}[do](**given)
        except Exception as error:
            lacking = isinstance(error, MemoryError) or is_oom(error)
            first = next(iter(str(error).strip().splitlines()), "") or type(error).__name__
            found = {"refused": "out of memory" if lacking else first}
        if lost := why_lost(self.job.device):
            raise DeviceLost(self.job.method, found.get("refused", lost))
        return found

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
        return {
            "cpu_seconds": taken.cpu,
            "wall_seconds": taken.wall,
            "noise_seconds": noise.wall if self.job.device == "cuda" else noise.cpu,
        }

    def update(self) -> dict[str, Any]:
        """Memory of a whole update, the optimiser's state included, then its time."""
        peak, step = peak_bytes(self._whole_step, self.job.device)
        taken = self._time(step, 1)
        workload, _ = self._get()
        return {
            "batch": workload.batch,
            "tokens": workload.tokens,
            "layers": workload.layers,
            "parameters": sum(p.numel() for p in workload.model.parameters()),
            "trainable": sum(p.numel() for p in workload.trainable),
            "cpu_seconds": taken.cpu,
            "wall_seconds": taken.wall,
            "peak_bytes": peak,
        }

    def _whole_step(self) -> Step:
        workload, method = self._get()
        optimizer = torch.optim.AdamW(workload.trainable, lr=LEARNING_RATE)

        def step() -> None:
            method.step()
            method.noise()
            optimizer.step()

        return step

    def _get(self) -> tuple[Workload, Method]:
        if self._built is None:
            self._built = prepare(self.job)
        return self._built

    def _time(self, step: Step, steps: int) -> Seconds:
        """Seconds a step."""
        watch = Stopwatch(self.job.device)
        for _ in range(steps):
            step()
        return watch.read(steps)

    def _tidy(self) -> None:
        """What is freed later must not count as freed by another job."""
        gc.collect()
        if self.job.device == "cuda":
            torch.cuda.empty_cache()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._built = None
        if kind is not DeviceLost:
            self._tidy()


class DeviceLost(Exception):
    """A kernel failed, after which this process can compute nothing more on its GPU."""

    def __init__(self, method: str, said: str) -> None:
        super().__init__(said)
        self.method = method


def why_lost(device: str) -> str:
    """What a kernel said whose failure has left this process without its GPU; "" where it is there."""
    try:
        if device == "cuda":
            torch.cuda.synchronize()
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return ""


@contextmanager
def measuring(device: str) -> Iterator[None]:
    """Inside, arithmetic and memory are those of a run, and libraries do not warn."""
    if device == "cpu":
        keep_freed_blocks()
    with warnings.catch_warnings(), arithmetic(torch.device(device)):
        warnings.simplefilter("ignore")
        yield
