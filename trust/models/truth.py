"""The reference: a loop over single examples with plain autograd in float64, without any of the tested code."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from trust.models.architecture import Subject


@dataclass(frozen=True)
class Truth:
    """Per-example gradients (B, *shape) by parameter name (a shared one once), zero if an example has none."""

    gradients: dict[str, Tensor]

    def first(self, examples: int) -> Truth:
        """The gradients of the first examples only."""
        return Truth({name: rows[:examples] for name, rows in self.gradients.items()})

    def norms(self, groups: list[list[str]]) -> Tensor:
        """‖g_k^(i)‖, (K, B)."""
        squares = {name: rows.reshape(len(rows), -1).square().sum(1) for name, rows in self.gradients.items()}
        return torch.stack([torch.stack([squares[name] for name in names]).sum(0).sqrt() for names in groups])

    def sums(self, groups: list[list[str]], thresholds: Tensor) -> dict[str, Tensor]:
        """Σ_i g_k^(i) · min(1, C_k / ‖g_k^(i)‖) by parameter name."""
        sums = {}
        for names, norms, threshold in zip(groups, self.norms(groups), thresholds, strict=True):
            factors = (threshold / norms.clamp_min(1e-300)).clamp_max(1)
            for name in names:
                sums[name] = torch.tensordot(factors, self.gradients[name], dims=1)
        return sums


def freeze_unreached(subject: Subject) -> list[str]:
    """Freeze the parameters that no loss reaches, as the refusal of such a model advises; returns their names."""
    trainable = trained(subject.model)
    with buffers_kept(subject.model):
        losses = subject.losses(subject.model, subject.batch)
    found = torch.autograd.grad(losses.sum(), list(trainable.values()), allow_unused=True)
    unreached = [name for name, gradient in zip(trainable, found, strict=True) if gradient is None]
    for name in unreached:
        trainable[name].requires_grad_(False)
    return unreached


def find_truth(subject: Subject) -> Truth:
    """One backward pass for each example, in a batch with a copy of itself.

    The copy does not contribute to the gradient. Without it torch's BatchNorm in eval mode is wrong on a CPU: for one
    example with an incoming gradient in channels_last, whose strides fit both layouts, it mixes up the channels.
    """
    trainable = trained(subject.model)
    rows: dict[str, list[Tensor]] = {name: [] for name in trainable}
    for i in range(len(next(iter(subject.batch.values())))):
        alone = {name: values[[i, i]] for name, values in subject.batch.items()}
        with buffers_kept(subject.model):
            loss = subject.losses(subject.model, alone)[0]
        found = torch.autograd.grad(loss, list(trainable.values()), allow_unused=True)
        for (name, parameter), gradient in zip(trainable.items(), found, strict=True):
            rows[name].append(torch.zeros_like(parameter) if gradient is None else gradient)
    return Truth({name: torch.stack(gradients) for name, gradients in rows.items()})


@contextmanager
def buffers_kept(model: nn.Module) -> Iterator[None]:
    """Restore the buffers of a model at the end, as forward passes may change them."""
    before = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        yield
    finally:
        for buffer, value in before:
            buffer.data = value


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    """Trainable parameters by name; a shared one has its first name."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def parameters_of(model: nn.Module, partition: tuple[tuple[str, ...], ...]) -> list[list[str]]:
    """The parameters of each group, from the names of the groups' layers.

    A parameter belongs to the innermost named layer that contains it; all names of a shared parameter must belong to
    the same group.

    Raises:
        ValueError: a trainable parameter is in no group, or in two.
    """
    group_of = {layer: k for k, layers in enumerate(partition) for layer in layers}
    first = {id(parameter): name for name, parameter in trained(model).items()}
    place: dict[str, int] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if not parameter.requires_grad:
            continue
        parts = name.split(".")
        inside = [".".join(parts[:depth]) for depth in range(len(parts), -1, -1)]
        k = next((group_of[layer] for layer in inside if layer in group_of), None)
        if k is None:
            raise ValueError(f"parameter {name} is in no group")
        if place.setdefault(first[id(parameter)], k) != k:
            raise ValueError(f"parameter {name} is in two groups")
    return [[name for name, found in place.items() if found == k] for k in range(len(partition))]
