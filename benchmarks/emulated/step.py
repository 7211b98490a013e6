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
"""An H100's, by its data sheet, so that the methods that are chosen are those of such a device."""
MEMORY = 80 << 30
"""Bytes, an H100's, by which chunks are cut."""
MODES = ("none", "flat", "ghost", "fixed_layer", "adaptive_layer")
BATCHES = {"wrn16_4_ws": 512, "wrn16_4_conv": 512, "roberta_base": 16, "gpt2": 16, "gpt2_untied": 16, "lora_gpt2": 16}
"""B of Figure 1 for the language models."""
TRACED = 6
"""Examples of a trace."""


@dataclass(frozen=True)
class Case:
    """What is run: one model in one mode, layout and precision.

    Args:
        model: one of `BATCHES`.
        mode: one of `MODES`.
        layout: "contiguous", or "channels_last" for images.
        precision: "float32", or "bfloat16", which is autocast.
        batch: B; None takes that of `BATCHES`.
        layers: transformer blocks; None takes all of them.
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
    """Draws on the emulated device, whose tensors the true source does not take for tensors."""

    @staticmethod
    def _check(tensor: Tensor, std: float) -> None:
        """Takes it all the same: the draws themselves are the true ones' operations."""


def _noise(sums: Tensor, rows: Tensor, secret: Tensor) -> None:
    """In the place of a kernel that only a real device compiles: one that reads and writes as much."""
    sums.add_(rows[:, 1])


@patch.object(philox_noise, "kernel_on", lambda device: _noise if device.type == "cuda" else philox_noise.noise_)
@patch.object(base, "device_memory", lambda kind, index: MEMORY)
def run(case: Case) -> dict[str, Any]:
    """One step, with the counts of its forward and backward pass, and of the rest: a row.

    Raises:
        Refused: what CUDA would refuse.
        Waits: the host asks for a value.
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
    """Where a model's layers hold the examples, as the CPU shows it: a device without numbers does not."""
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
