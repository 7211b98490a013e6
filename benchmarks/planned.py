"""Bytes of an update that is not run: weights on the meta device, activations from a model of one and of two blocks."""

from dataclasses import astuple, dataclass, replace

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from benchmarks.job import Job
from benchmarks.methods import prepare

MOMENTS = 2  # of AdamW, each of the size of what trains


@dataclass(frozen=True)
class Plan:
    """Bytes of one update of non-private training; private training adds little to them."""

    frozen_weights: int
    trained_weights: int
    """The adapters, where only these train."""
    gradients: int
    optimizer_state: int
    activations: int
    """What the forward pass keeps for the backward pass."""

    @property
    def total(self) -> int:
        """All of them at once, which a step never quite holds."""
        return sum(astuple(self))


def plan(job: Job) -> Plan:
    """Plan a language model's update; every block after the first keeps as much as the second."""
    workload, _ = prepare(replace(job, method="none", device="meta"))
    assert workload.layers is not None
    trained = sum(p.nbytes for p in workload.trainable)
    weights = sum(p.nbytes for p in workload.model.parameters())
    one, two = (kept_bytes(replace(job, layers=layers)) for layers in (1, 2))
    activations = one + (workload.layers - 1) * (two - one)
    return Plan(weights - trained, trained, trained, MOMENTS * trained, activations)


def kept_bytes(job: Job) -> int:
    """Run a job's forward pass and add up what it keeps for the backward pass, weights aside."""
    workload, _ = prepare(replace(job, method="none"))
    weights = {p.untyped_storage().data_ptr() for p in workload.model.parameters()}
    kept: dict[int, int] = {}

    def weigh(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(weigh, lambda tensor: tensor):
        losses = workload.loss()
    assert torch.is_tensor(losses)  # alive until here, so that no storage came twice
    return sum(size for place, size in kept.items() if place not in weights)
