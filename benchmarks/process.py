"""A process that runs one job and answers requests."""

from __future__ import annotations

import multiprocessing
import os
import warnings
from multiprocessing.connection import Connection
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.job import Job
from benchmarks.worker import Bench, answer
from groupwise.clipping.precision import full_float32
from groupwise.training.memory import keep_freed_blocks

KILLED = "killed by the system, probably out of memory"


def serve(pipe: Connection, job: Job) -> None:
    """Answer requests until the other end of the pipe is closed."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(job.threads)
    if job.device == "cpu":
        keep_freed_blocks()  # as a run does
    bench = Bench(job)
    with full_float32():
        while True:
            try:
                request = pipe.recv()
            except EOFError:
                return
            pipe.send(answer(bench, request))


class Process:
    """`benchmarks.worker` for one job in a separate process, alive until `close`; also a context manager.

    If an answer takes more than `limit` seconds, the process is killed, and every later request gets the same
    ``{"refused": …}``.
    """

    def __init__(self, job: Job, limit: float) -> None:
        self.job, self._limit = job, limit
        self._failure: dict[str, Any] | None = None
        start = multiprocessing.get_context("spawn")
        self._pipe, there = start.Pipe()
        self.process = start.Process(target=serve, args=(there, job), daemon=True)
        with patch.dict(os.environ, OMP_NUM_THREADS=str(job.threads), MKL_NUM_THREADS=str(job.threads)):
            self.process.start()
        there.close()

    def ask(self, **request: Any) -> dict[str, Any]:
        """Send a request and wait for its answer; failures are answers too."""
        if self._failure is None:
            try:
                self._pipe.send(request)
                if self._pipe.poll(self._limit):
                    return self._pipe.recv()
                self._failure = {"refused": f"no answer within {self._limit:g} s"}
            except (EOFError, OSError):
                self.process.join()
                code = self.process.exitcode
                self._failure = {"refused": KILLED if code == -9 else f"ended with exit code {code}"}
            self.close()
        return self._failure

    def close(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.join()
        self._pipe.close()

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
