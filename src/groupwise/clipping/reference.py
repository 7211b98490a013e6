"""Clips per-example gradients by a loop over single examples, one by one: the truth, slow and plain."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from groupwise.clipping.factors import ClipRule, clip_factors
from groupwise.clipping.partition import Partition, find_layers
from groupwise.errors import UserError


@dataclass(frozen=True)
class Reference:
    """Clipped sums by parameter name, per-example norms (K, n) and counts (K,)."""

    sums: dict[str, Tensor]
    norms: Tensor
    counts: Tensor


def clipped_sums(
    model: nn.Module,
    loss_of: Callable[[int], Tensor],
    examples: Sequence[int],
    partition: Partition,
    thresholds: Sequence[float] | Tensor,
    clip_rule: ClipRule = clip_factors,
) -> Reference:
    """Σ_i g_k^(i)·factor(‖g_k^(i)‖, C_k) with one backward pass an example.

    Args:
        model: the model, with no engine attached (or bypassed).
        loss_of: index of an example -> its loss, a scalar tensor, computed alone.
        examples: the indices to sum over.
        partition: the groups.
        thresholds: C_k, (K,).
        clip_rule: the rule of the engine that is compared.

    Raises:
        UserError: a trainable parameter that no loss depends on.
    """
    names = {id(p): name for name, p in model.named_parameters() if p.requires_grad}
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    layers = {layer.name: layer for layer in find_layers(model)}
    members = [
        sorted({names[id(p)] for name in group.layers for p in layers[name].trainable.values()}) for group in partition
    ]
    thresholds = torch.as_tensor(thresholds, dtype=next(iter(parameters.values())).dtype)
    sums = {name: torch.zeros_like(p) for name, p in parameters.items()}
    norms = torch.zeros(len(partition), len(examples), dtype=thresholds.dtype)
    reached: set[str] = set()
    for column, example in enumerate(examples):
        found = torch.autograd.grad(loss_of(example), list(parameters.values()), allow_unused=True)
        gradients = {name: g for name, g in zip(parameters, found, strict=True) if g is not None}
        reached |= gradients.keys()
        for k, group in enumerate(members):
            squares = [gradients[name].square().sum() for name in group if name in gradients]
            norms[k, column] = torch.stack(squares).sum().sqrt() if squares else 0.0
            if not norms[k, column].isfinite():
                continue  # such an example is left out of the group
            factor = float(clip_rule(norms[k, column].view(1), thresholds[k]))
            for name in group:
                if name in gradients:
                    sums[name] += factor * gradients[name]
    for name in parameters:
        if name not in reached:
            raise UserError(f"Parameter {name!r} trains, but no example's loss depends on it: freeze it, or use it.")
    return Reference(sums, norms, (norms <= thresholds[:, None]).sum(1).to(torch.float64))
