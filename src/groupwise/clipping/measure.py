"""Measures the norms of single examples' gradients, without privacy.

They come straight from the data: do not publish them.
"""

from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor, nn

from groupwise.clipping.autograd import run_backward
from groupwise.clipping.checks import check_losses
from groupwise.clipping.cost_model import Formula
from groupwise.clipping.engine import ClippingEngine, attach
from groupwise.clipping.microbatches import NOT_NAMED
from groupwise.clipping.partition import Partition, per_layer
from groupwise.clipping.verification.independence import kept_buffers
from groupwise.clipping.verification.randomness import Generators

Batch = TypeVar("Batch")


def gradient_norms(
    model: nn.Module,
    batches: Iterable[Batch],
    losses: Callable[[Batch], Tensor],
    partition: Partition | None = None,
    *,
    formula: Formula = "auto",
    batch_axis: int = 0,
) -> dict[str, Tensor]:
    """‖g_k^(i)‖ of each example's loss in each group (Figures 2 and 5 of the paper), by the engine that clips.

    The norms are not private: each is one example's own, without noise. Nothing is clipped and nothing changed:
    parameters, their .grad, buffers and the default generators are as before, after an error too.

    Args:
        model: whose parameters train; nothing may be attached to it.
        batches: examples in microbatches, as many at a time as there is memory for.
        losses: one loss per example of a batch, (B,), from `model`.
        partition: groups; None is one a layer, `flat(model)` the whole gradient.
        formula: "auto" raises norms of cancelling terms a little, in float32 (docs/sharp_edges.md, "Numbers");
            "materialize" measures them exactly.
        batch_axis: which axis of the model's first input tensor counts examples, 0 or 1.

    Returns:
        Group's name, in the model's own order -> norms of all examples in the order of `batches`, (N,) float64, on the
        CPU.

    Raises:
        UserError: as `attach` and `ClippingEngine.backward` do.
    """
    groups = per_layer(model) if partition is None else partition
    found: list[Tensor] = []
    with _unchanged(model), attach(model, groups, 1.0, formula=formula, batch_axis=batch_axis) as engine:
        for batch in _not_empty(batches):
            found.append(norms_of_losses(engine, losses(batch)).cpu())
    norms = torch.cat(found, dim=1) if found else torch.empty(len(groups), 0, dtype=torch.float64)
    return {group.name: row for group, row in zip(groups, norms, strict=True)}


def norms_of_losses(engine: ClippingEngine, losses: Tensor) -> Tensor:
    """‖g_k^(i)‖ of losses (B,) from the engine's model, (K, B) float64; no .grad and no count changes.

    Raises:
        UserError: as `ClippingEngine.backward` does.
    """
    check_losses(losses)
    engine.check_output(losses)
    with engine.norms_of(NOT_NAMED, len(losses)):
        run_backward(losses)
    return engine.per_example_norms


def _not_empty(batches: Iterable[Batch]) -> Iterator[Batch]:
    """The batches that are not known to be empty, which not every model runs on."""
    return (batch for batch in batches if not isinstance(batch, Sized) or len(batch))


@contextmanager
def _unchanged(model: nn.Module) -> Iterator[None]:
    """Afterwards buffers and the default generators are as before."""
    generators = Generators({parameter.device for parameter in model.parameters()})
    with generators.kept(), kept_buffers(model), torch.enable_grad():
        yield
