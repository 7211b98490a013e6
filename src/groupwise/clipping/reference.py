"""Clips by a loop over single examples, as the reference for the engine; explains how the engine computes norms."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from groupwise.clipping.engine import ClippingEngine
from groupwise.clipping.factors import ClipRule, clip_factors
from groupwise.clipping.groups import ClippedLayer
from groupwise.clipping.partition import Partition, find_layers


@dataclass(frozen=True)
class Reference:
    """Clipped sums by parameter name; per-example norms (K, n) and counts (K,), each example once; and, by parameter
    name, Σ_i factor_i·‖g^(i)‖."""

    sums: dict[str, Tensor]
    norms: Tensor
    counts: Tensor
    sizes: dict[str, float]


def clipped_sums(
    model: nn.Module,
    loss_of: Callable[[int], Tensor],
    examples: Sequence[int],
    partition: Partition,
    thresholds: Sequence[float] | Tensor,
    clip_rule: ClipRule = clip_factors,
    times: Sequence[int] | None = None,
) -> Reference:
    """Σ_i g_k^(i)·factor(‖g_k^(i)‖, C_k), with one backward pass per example.

    Args:
        model: the model, with no engine attached (or bypassed).
        loss_of: index of an example -> its loss, a scalar tensor, computed alone.
        examples: the indices to sum over.
        partition: the groups.
        thresholds: C_k, (K,).
        clip_rule: the clip rule of the engine.
        times: how often each example is in the batch; once by default.
    """
    names = {id(p): name for name, p in model.named_parameters() if p.requires_grad}
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    layers = {layer.name: layer for layer in find_layers(model)}
    members = [
        sorted({names[id(p)] for name in group.layers for p in layers[name].trainable.values()}) for group in partition
    ]
    thresholds = torch.as_tensor(thresholds, dtype=next(iter(parameters.values())).dtype, device="cpu")
    sums = {name: torch.zeros_like(p) for name, p in parameters.items()}
    sizes = dict.fromkeys(parameters, 0.0)
    norms = torch.zeros(len(partition), len(examples), dtype=thresholds.dtype, device="cpu")
    for column, (example, n) in enumerate(zip(examples, times or [1] * len(examples), strict=True)):
        found = torch.autograd.grad(loss_of(example), list(parameters.values()), materialize_grads=True)
        gradients = dict(zip(parameters, found, strict=True))
        for k, group in enumerate(members):
            norms[k, column] = torch.stack([gradients[name].square().sum() for name in group]).sum().sqrt()
            if not norms[k, column].isfinite():
                continue  # such an example is left out of the group
            factor = n * float(clip_rule(norms[k, column].view(1), thresholds[k]))
            for name in group:
                sums[name] += factor * gradients[name]
                sizes[name] += factor * float(gradients[name].norm())
    return Reference(sums, norms, (norms <= thresholds[:, None]).sum(1).to(torch.float64), sizes)


_HEAD = ("layer", "type", "input -> output", "norms by", "estimated, for norms and clipped sum")


def explain(engine: ClippingEngine) -> str:
    """A table of layers: the norm formula that the last backward pass used, and the estimated cost of each formula.

    Some layers have only one method (embeddings, normalisations, inputs without a second axis).
    """
    rows = [_HEAD, *(_row(member) for group in engine.groups for member in group.members)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def _row(member: ClippedLayer) -> tuple[str, ...]:
    name, kind, methods = member.name or "(model)", type(member.rule.module).__name__, member.rule.methods
    if (last := methods.last) is None:
        return (name, kind, "", "one method", "no choice")
    arrow = " -> ".join("×".join(map(str, sizes)) for sizes in last[:2])
    costs = sorted(methods.costs[last].items(), key=lambda item: item[0] != methods.chosen[last])
    text = ", ".join(f"{name} {1e6 * seconds:.1f} µs an example" for name, seconds in costs)
    return (name, kind, arrow, methods.chosen[last], text)
