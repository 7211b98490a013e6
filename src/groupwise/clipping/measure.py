"""Per-example gradient norms of every layer, for a look at a model rather than a step of training."""

from collections.abc import Callable, Iterable
from typing import TypeVar

import torch
from torch import Tensor, nn

from groupwise.clipping.engine import attach
from groupwise.clipping.partition import Partition, per_layer

Batch = TypeVar("Batch")


def gradient_norms(
    model: nn.Module,
    batches: Iterable[Batch],
    losses: Callable[[Batch], Tensor],
    partition: Partition | None = None,
) -> dict[str, Tensor]:
    """‖g_k^(i)‖ of each example's loss in each group (Figures 2 and 5 of the paper), by the engine that clips.

    Nothing is changed: the parameters' .grad are as before. The norms are the training data's own, so they are no
    private release.

    Args:
        model: whose parameters train; nothing may be attached to it.
        batches: examples in microbatches, as many at a time as there is memory for.
        losses: one loss per example of a batch, (B,), from `model`.
        partition: groups; None is one a layer.

    Returns:
        Group's name, in the model's own order -> norms of all examples in the order of `batches`, (N,), on the CPU.

    Raises:
        UserError: as `attach` and `ClippingEngine.backward` do.
    """
    groups = per_layer(model) if partition is None else partition
    before = [parameter.grad for parameter in model.parameters()]
    found: list[Tensor] = []
    with attach(model, groups, thresholds=1.0) as engine:
        try:
            for batch in batches:
                for parameter in model.parameters():
                    parameter.grad = None
                engine.backward(losses(batch))
                found.append(engine.per_example_norms.cpu())
        finally:
            for parameter, gradient in zip(model.parameters(), before, strict=True):
                parameter.grad = gradient
    norms = torch.cat(found, dim=1) if found else torch.empty(len(groups), 0)
    return {group.name: row for group, row in zip(groups, norms, strict=True)}
