"""CPU and wall seconds of steps, with the GPU waited for at both ends."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Seconds:
    """CPU time of the process and wall time, of one step; on a GPU the wall time is between two of its events."""

    cpu: float
    wall: float


class Stopwatch:
    """Runs from its making on."""

    def __init__(self, device: torch.device | str) -> None:
        self._begin: torch.cuda.Event | None = None
        if torch.device(device).type == "cuda":
            torch.cuda.synchronize()
            self._begin = torch.cuda.Event(enable_timing=True)
        self._cpu, self._wall = time.process_time(), time.perf_counter()
        if self._begin is not None:
            self._begin.record()

    def read(self, steps: int) -> Seconds:
        """Seconds a step, if so many were taken."""
        if self._begin is None:
            wall = time.perf_counter() - self._wall
        else:
            end = torch.cuda.Event(enable_timing=True)
            end.record()
            torch.cuda.synchronize()
            wall = self._begin.elapsed_time(end) / 1000
        return Seconds((time.process_time() - self._cpu) / steps, wall / steps)
