"""CPU and wall seconds of steps, with the GPU waited for at both ends."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Seconds:
    """CPU time of the process and wall time, of one step."""

    cpu: float
    wall: float


class Stopwatch:
    """Runs from its making on."""

    def __init__(self, device: torch.device | str) -> None:
        self._gpu = torch.device(device).type == "cuda"
        self._wait()
        self._cpu, self._wall = time.process_time(), time.perf_counter()

    def read(self, steps: int) -> Seconds:
        """Seconds a step, if so many were taken."""
        self._wait()
        return Seconds((time.process_time() - self._cpu) / steps, (time.perf_counter() - self._wall) / steps)

    def _wait(self) -> None:
        if self._gpu:
            torch.cuda.synchronize()
