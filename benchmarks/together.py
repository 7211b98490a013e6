"""Answers as a process of its own would, in this one: a GPU takes longer to start than to measure."""

from __future__ import annotations

import gc
from types import TracebackType
from typing import Any

import torch

from benchmarks.job import Job
from benchmarks.worker import Bench, answer


class DeviceLost(Exception):
    """A kernel failed, after which this process can compute nothing more on its GPU."""


class Together:
    """`benchmarks.process.Process` without a process: many can be there at once, and a GPU's memory is given back.

    Raises:
        DeviceLost: at the question that broke the GPU; `refused` is what was said.
    """

    def __init__(self, job: Job, limit: float) -> None:
        self.job = job
        self._bench: Bench | None = Bench(job)
        torch.set_num_threads(job.threads)

    def ask(self, **request: Any) -> dict[str, Any]:
        """Answer a request; failures are answers too. What takes too long is not cut off: only a process could be."""
        assert self._bench is not None
        self._tidy()
        found = answer(self._bench, request)
        if self.job.device == "cuda":
            try:
                torch.cuda.synchronize()
            except RuntimeError as error:
                raise DeviceLost(found.get("refused") or str(error).splitlines()[0]) from error
        return found

    def close(self) -> None:
        """Forget the model."""
        self._bench = None
        self._tidy()

    def _tidy(self) -> None:
        gc.collect()
        if self.job.device == "cuda":
            torch.cuda.empty_cache()

    def __enter__(self) -> Together:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not DeviceLost:
            self.close()
