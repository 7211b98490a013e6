"""Stubs in place of measurements: a result row, and a process whose answers a function computes."""

from collections.abc import Callable
from functools import partial
from typing import Any

from benchmarks.job import Job


def row(method: str = "none", number: int = 0, seconds: float | None = 2.0, **more: Any) -> dict[str, Any]:
    """A row of throughput.csv; without `seconds`, its status is a refusal."""
    place = {"workload": "mlp", "method": method, "memory_format": "contiguous", "batch": 4, "layers": None}
    machine = {"device": "cpu", "threads": 1, "dtype": "float32", "round": number, "peer": None, "parameters": 3}
    clocks = {"cpu_seconds": seconds, "wall_seconds": None if seconds is None else 10 * seconds, "noise_seconds": 0.1}
    facts = {"examples_per_second": 4.0, "peak_bytes": 100, "flops": 50, "status": "ok" if seconds else "refused: no"}
    return {**place, **machine, **clocks, **facts, **more}


TIMES = {"cpu_seconds": 1.0, "wall_seconds": 2.0, "noise_seconds": 0.1}
"""The answer to a round."""


def answering(answer: Callable[..., dict[str, Any]]) -> type:
    """A stub for `benchmarks.process.Process` that answers requests with `answer(job, do=..., ...)`."""

    class Process:
        def __init__(self, job: Job, limit: float) -> None:
            self.ask = partial(answer, job)

        def __enter__(self) -> "Process":
            return self

        def __exit__(self, *_: object) -> None:
            pass

    return Process
