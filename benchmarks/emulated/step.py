"""Runs one private step on the emulated device: forward, backward, release and update."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.emulated.device import EmulatedGPU, emulate, on_device
from benchmarks.methods import NonPrivate, Ours
from benchmarks.workloads import Workload, build
from groupwise.clipping import ClipPlan, Rates, attach, flat, per_layer
from groupwise.clipping.rules import base
from groupwise.privacy import NoiseSource, philox_noise

RATES = Rates(product=4e13, gram=1.1e13, outer=2.5e13, bytes=2.2e12, starts=2.5e5)
"""Rates of an H100 by its data sheet, so that the engine chooses the same norm methods as on that GPU."""
MEMORY = 80 << 30
"""Bytes of an H100, which limit the size of chunks."""
MODES = ("none", "flat", "ghost", "fixed_layer", "adaptive_layer")
BATCHES = {"wrn16_4_ws": 512, "wrn16_4_conv": 512, "roberta_base": 16, "gpt2": 16, "gpt2_untied": 16, "lora_gpt2": 16}
"""B of Figure 1 for the language models."""
TRACED = 6
"""Examples that are traced on the CPU."""


@dataclass(frozen=True)
class Case:
    """One model in one mode, layout and precision.

    Args:
        model: one of `BATCHES`.
        mode: one of `MODES`.
        layout: "contiguous", or "channels_last" for images.
        precision: "float32", or "bfloat16", which is autocast.
        batch: B; None means that of `BATCHES`.
        layers: transformer blocks; None means all of them.
        tiny: the same layers at sizes for tests.
    """

    model: str
    mode: str
    layout: str = "contiguous"
    precision: str = "float32"
    batch: int | None = None
    layers: int | None = None
    tiny: bool = False


class EmulatedNoise(NoiseSource):
    """A noise source that also accepts tensors on the emulated device."""

    @staticmethod
    def _check(tensor: Tensor, std: float) -> None:
        """Skip the check, which would refuse emulated tensors; drawing uses the same operations as a real source."""


def _noise(sums: Tensor, rows: Tensor, secret: Tensor) -> None:
    """Replaces a kernel that only a real GPU can compile by one that reads and writes as many bytes."""
    sums.add_(rows[:, 1])


@patch.object(philox_noise, "kernel_on", lambda device: _noise if device.type == "cuda" else philox_noise.noise_)
@patch.object(base, "device_memory", lambda kind, index: MEMORY)
def run(case: Case) -> dict[str, Any]:
    """Run one step; returns a row with the counts of its forward and backward pass, and of release and update.

    Raises:
        Refused: CUDA would refuse an operation.
        Waits: the host reads a value.
    """
    gpu = EmulatedGPU()
    workload = _workload(case, gpu)
    if case.mode == "none":
        method = NonPrivate(workload)
    else:
        groups = per_layer if case.mode.endswith("layer") else flat
        norms = "ghost" if case.mode == "ghost" else "bookkeeping"
        plan, noise = traced(case.model, case.layers, case.tiny), EmulatedNoise.from_seed(0)
        with gpu:
            options: dict[str, Any] = {"rates": RATES, "plan": plan, "noise": noise, "norms": norms}
            method = Ours(workload, groups, adaptive=case.mode.startswith("adaptive"), **options)
    optimizer = torch.optim.SGD(workload.trainable, lr=0.1, momentum=0.9, foreach=True)
    with gpu, gpu.counted() as passed:
        method.work()
    with gpu, gpu.counted() as rest:
        method.noise()
        optimizer.step()
        method.end()
        method.begin()
    return _row(case, workload.batch, passed, rest)


@cache
def traced(name: str, layers: int | None, tiny: bool) -> ClipPlan:
    """The plan of a model's layers, traced on the CPU, as a trace needs values."""
    workload = build(name, batch=TRACED, layers=layers, tiny=tiny)
    with attach(workload.model, flat(workload.model), 0.1, rates=RATES) as engine:
        return engine.trace(workload.losses, range(TRACED))


def _workload(case: Case, gpu: EmulatedGPU) -> Workload:
    """The model and its data on the device."""
    batch = case.batch or (5 if case.tiny else BATCHES[case.model])
    sizes: dict[str, Any] = {"batch": batch, "layers": case.layers, "tiny": case.tiny}
    workload = build(case.model, **sizes, device="meta", channels_last=case.layout == "channels_last")
    plain = workload.losses

    def losses(rows: Sequence[int] | None) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16) if case.precision == "bfloat16" else nullcontext():
            return plain(rows)

    with gpu:
        emulate(workload.model)
        workload.data = {key: on_device(value) for key, value in workload.data.items()}
    workload.losses = losses
    return workload


def _row(case: Case, batch: int, passed: dict[str, Any], rest: dict[str, Any]) -> dict[str, Any]:
    waits = dict(sorted({f"backward: {k}": v for k, v in passed["waits"].items()}.items())) | rest["waits"]
    return (
        asdict(case)
        | {"batch": batch, "operations": passed["operations"], "launches": passed["launches"], "bytes": passed["bytes"]}
        | {"rest_operations": rest["operations"], "rest_launches": rest["launches"], "rest_bytes": rest["bytes"]}
        | {"waits": waits, "uploads": {**passed["uploads"], **rest["uploads"]}}
    )
