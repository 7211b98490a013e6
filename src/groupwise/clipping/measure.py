"""Measures per-example gradient norms, without privacy, for figures, outliers and mislabelled examples."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from groupwise.clipping.checks import LossesOf, check_losses
from groupwise.clipping.engine import attach
from groupwise.clipping.norm_methods import Formula
from groupwise.clipping.partition import Partition, per_layer
from groupwise.clipping.passes import UNNAMED
from groupwise.clipping.unchanged import unchanged


def gradient_norms(
    model: nn.Module,
    losses_of: LossesOf,
    examples: Sequence[int],
    partition: Partition | None = None,
    *,
    microbatch: int = 64,
    formula: Formula = "auto",
) -> dict[str, Tensor]:
    """‖g_k^(i)‖ of each example's loss in each group (Figures 2 and 4 of the paper), computed by the clipping engine.

    The norms are not private: each comes from one example, without noise. Nothing is clipped or changed: parameters,
    their .grad, buffers and the default generators are as before, even after an error.

    Args:
        model: the model.
        losses_of: indices of examples -> one loss for each, (n,), computed by `model`.
        examples: the indices to measure, the longest first if lengths differ.
        partition: the groups; None: one per layer. `flat(model)` gives the norm of the whole gradient.
        microbatch: how many examples run at once.
        formula: in float32, "auto" raises norms of cancelling terms a little (docs/sharp_edges.md, "Numbers"), and
            "materialize" less. In float64 both are exact.

    Returns:
        Group name, in the model's order -> norms in the order of `examples`, (N,) float64, on the CPU.

    Raises:
        UserError: as `attach`, `ClippingEngine.trace` and `ClippingEngine.clip` do.
    """
    groups = per_layer(model) if partition is None else partition
    found: list[Tensor] = []
    with unchanged(model), attach(model, groups, 1.0, formula=formula) as engine:
        if min(len(examples), microbatch) > 1:
            engine.trace(losses_of, examples)
        for start in range(0, len(examples), microbatch):
            rows = examples[start : start + microbatch]
            losses = engine.losses(losses_of, rows)
            check_losses(losses, len(rows))
            engine.check_output(losses)
            with engine.norms_of(UNNAMED):
                losses.sum().backward()
            found.append(engine.per_example_norms.cpu())
    norms = torch.cat(found, dim=1) if found else torch.empty(len(groups), 0, dtype=torch.float64)
    return {group.name: row for group, row in zip(groups, norms, strict=True)}
