"""Speeds of devices: accelerators from published figures, this machine's CPU from timing."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from statistics import median
from typing import Protocol

import torch

from groupwise.clipping import attach, flat
from groupwise.planner.footprint import Footprint, Kind, Passes, Work, cut_out, inputs
from groupwise.privacy import NoiseSource, release_gradients

GIB = 2**30


@dataclass(frozen=True)
class Accelerator:
    """One device of a pipeline, and its links."""

    name: str
    memory: float
    """Bytes."""
    peak: dict[str, float]
    """Operations a second by dtype, as the data sheet says; empty: measured when it is asked for."""
    share: float
    """The share of the peak that training of large transformers achieves overall."""
    bandwidth: float
    """Bytes a second between the device and its own memory."""
    link: float
    """Bytes a second to a neighbour, one direction."""
    latency: float
    """Seconds until a message's first byte is there."""

    @property
    def reserved(self) -> float:
        """Bytes not available to tensors: context, libraries' workspaces, fragmentation."""
        return 0.0 if self.measured else 1e9

    @property
    def dtype(self) -> str:
        """The default dtype of frozen weights."""
        return next(iter(self.peak), "float32")

    @property
    def measured(self) -> bool:
        """Whether its speed is measured on this machine instead of looked up."""
        return not self.peak


MACHINE = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")) if hasattr(os, "sysconf") else 8 * GIB
"""Bytes of this machine."""
_TENSOR_CORES = ("bfloat16", "float16")
_KNOWN = (
    # NVIDIA V100 data sheet (SXM3, 32 GB): 125 and 15.7 TFLOP/s, 900 GB/s; DGX-2: NVSwitch, 150 GB/s a direction.
    # Share: one V100 of a DGX-2H trains a GPT-2 of 1.2 billion parameters at 39 TFLOP/s (Megatron-LM, 2019,
    # section 5.1).
    Accelerator("v100_32gb", 32 * GIB, {"float16": 125e12, "float32": 15.7e12}, 39 / 125, 900e9, 150e9, 2e-5),
    # NVIDIA A100 data sheet (SXM, 80 GB): 312 and 19.5 TFLOP/s, 2,039 GB/s, NVLink 300 GB/s a direction.
    # Share: 138 TFLOP/s a device at GPT-3's shape, pipeline included (Narayanan et al., 2021, table 1: 44 %).
    Accelerator(
        "a100_80gb", 80 * GIB, dict.fromkeys(_TENSOR_CORES, 312e12) | {"float32": 19.5e12}, 0.44, 2039e9, 300e9, 2e-5
    ),
    # NVIDIA H100 data sheet (SXM, without sparsity): 989 and 67 TFLOP/s, 3.35 TB/s, NVLink 450 GB/s a direction.
    # Share: 400 TFLOP/s a device (The Llama 3 herd of models, 2024, table 4: 38 to 43 %).
    Accelerator("h100", 80 * GIB, dict.fromkeys(_TENSOR_CORES, 989e12) | {"float32": 67e12}, 0.4, 3350e9, 450e9, 2e-5),
    # This machine, one process a stage: blocks are timed here (`Timed`). Links: gloo over the loopback interface.
    Accelerator("cpu", MACHINE, {}, 1.0, 1e10, 1.5e9, 2e-4),
)
ACCELERATORS = {device.name: device for device in _KNOWN}


UPDATE_PASSES = 10  # reads and writes of a trained number: noise, division, both moments, weight


@dataclass(frozen=True)
class Seconds:
    """Of one microbatch forward and backward (recomputation included), at one stage."""

    forward: float
    backward: float


class Speed(Protocol):
    """The duration of passes and updates on a device."""

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


REPEATS = 7
MIDDLE, MORE = Kind(1, False, False), 2


class Timed:
    """CPU seconds of one thread, the median of a few.

    Stages of one block and of three are timed; any stage is then its ends and as many blocks as it has.
    """

    def __init__(self, work: Work) -> None:
        self._work = work
        self._timed = lru_cache(self._time)

    def passes(self, kind: Kind, name: str) -> Seconds:
        """See `accelerators.Speed`."""
        ends = self._timed(replace(kind, blocks=1), name)
        if kind.blocks == 1:
            return ends
        one, three = self._timed(MIDDLE, name), self._timed(replace(MIDDLE, blocks=1 + MORE), name)
        more = (kind.blocks - 1) / MORE
        return Seconds(
            ends.forward + more * max(three.forward - one.forward, 0.0),
            ends.backward + more * max(three.backward - one.backward, 0.0),
        )

    def _time(self, kind: Kind, name: str) -> Seconds:
        stage = cut_out(self._work, kind, "cpu")
        passes = Passes(stage, self._work, name)
        x, kwargs = inputs(stage, self._work)
        found: list[tuple[float, float]] = []
        gradient = None
        for _ in range(1 + REPEATS):  # the first to warm up: it may choose formulas and fill caches
            start = time.process_time()
            out = passes.forward(x, kwargs)
            middle = time.process_time()
            if gradient is None and not stage.last:
                gradient = torch.randn_like(out)
            begin = time.process_time()
            passes.backward(out, gradient)
            end = time.process_time()
            x.grad = None
            found.append((middle - start, end - begin))
        forward, backward = zip(*found[1:], strict=True)
        return Seconds(median(forward), median(backward))

    def update(self, kind: Kind, *, noisy: bool) -> float:
        """See `accelerators.Speed`; in proportion to what one block's takes."""
        stage = cut_out(self._work, kind)
        numbers = sum(p.numel() for p in stage.parameters() if p.requires_grad)
        return numbers * self._update(noisy)

    def _update(self, noisy: bool) -> float:
        """Seconds a trained number."""
        stage = cut_out(self._work, MIDDLE, "cpu")
        trained = [p for p in stage.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-6)
        noise = NoiseSource.from_seed(0)
        for parameter in trained:
            parameter.grad = torch.zeros_like(parameter)
        with attach(stage, flat(stage), 1.0) as engine:
            sensitivity = engine.sensitivity("add_remove")

        def update() -> None:
            if noisy:
                release_gradients(
                    sensitivity,
                    allocation="equal_budget",
                    noise_multiplier=1.0,
                    expected_batch_size=1.0,
                    noise=noise,
                    step=0,
                )
            optimizer.step()

        update()
        return _usual(update) / sum(p.numel() for p in trained)


def _usual(run: Callable[[], object]) -> float:
    times = []
    for _ in range(REPEATS):
        start = time.process_time()
        run()
        times.append(time.process_time() - start)
    return median(times)
