"""Seconds of one microbatch at one stage, from an accelerator's published figures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from groupwise.pipeline.plan.accelerators import Accelerator
from groupwise.pipeline.plan.footprint import Footprint
from groupwise.pipeline.plan.work import Kind

UPDATE_PASSES = 10  # reads and writes of a trained number: noise, division, both moments, weight


@dataclass(frozen=True)
class Seconds:
    """Of one microbatch forward and backward (recomputation included), at one stage."""

    forward: float
    backward: float


class Speed(Protocol):
    """How long things take on a device."""

    def passes(self, kind: Kind, name: str) -> Seconds:
        """One microbatch at a stage of this kind, its backward pass one of `work.PASSES`."""

    def update(self, kind: Kind, *, noisy: bool) -> float:
        """Noise and optimiser of a stage, once a step."""


class Rated:
    """Operations over the achieved rate, but no less than it takes to read the weights once a pass.

    Kernels that move bytes and little else (norms of layers, softmax, clipping) are in the achieved rate, which is that
    of whole trainings. So clipping costs its operations here, and nothing for its small kernels.
    """

    def __init__(
        self, device: Accelerator, dtype: str, footprint: Callable[[Kind, str], Footprint], *, rematerialize: bool
    ) -> None:
        self._device, self._rate = device, device.peak[dtype] * device.share
        self._footprint, self._rematerialize = footprint, rematerialize

    def passes(self, kind: Kind, name: str) -> Seconds:
        """See `Speed`."""
        found = self._footprint(kind, name)
        reading = (found.frozen + found.trained) / self._device.bandwidth
        return Seconds(
            max(found.forward_operations / self._rate, reading),
            max(found.backward_operations / self._rate, reading * (1 + self._rematerialize)),
        )

    def update(self, kind: Kind, *, noisy: bool) -> float:
        """See `Speed`."""
        return UPDATE_PASSES * self._footprint(kind, "device" if noisy else "none").trained / self._device.bandwidth
