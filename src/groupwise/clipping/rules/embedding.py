"""Clips embeddings: one example's gradient adds the output gradients of equal indices; nothing is ever one-hot.

`nn.EmbeddingBag` is said in plain operations on an embedding: bags become rows of one length, and what is not in a bag
is masked out. With offsets the first axis of its input is no batch: an example is a bag, and there are as many as
offsets (less the last, where the module is told to include it).
"""

from collections.abc import Sequence
from functools import partial
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from groupwise.clipping.cost_model import OuterProducts
from groupwise.clipping.factors import scale_rows
from groupwise.clipping.norm_terms import Terms
from groupwise.clipping.precision import second_product_slack, squared_row_norms, upcast
from groupwise.clipping.rules.base import (
    Finish,
    Gradients,
    IndexedSum,
    LayerRule,
    RuleContext,
    Saved,
    Wanted,
    register_rule,
)
from groupwise.clipping.rules.weights import Forward, Weights
from groupwise.errors import UserError


@register_rule
class EmbeddingRule(LayerRule):
    """`nn.Embedding`: weight (V, d); rows of `padding_idx` get no gradient."""

    layer_type: ClassVar[type[nn.Module]] = nn.Embedding
    parameter_names: ClassVar[tuple[str, ...]] = ("weight",)
    autocast: ClassVar = "keep"
    features_last: ClassVar[bool] = True
    stacks: ClassVar[bool] = True
    module: nn.Embedding

    def refuse(self) -> str | None:
        return refuse_embedding(self.module)

    def forward(self, x: Tensor, *parameters: Tensor | None) -> tuple[Tensor, Saved]:
        (weight,) = parameters
        assert weight is not None
        return F.embedding(x, weight, self.module.padding_idx), (x,)

    def input_gradient(self, saved: Saved, g: Tensor) -> None:
        return None

    def rows(self, saved: Saved, g: Tensor) -> tuple[Tensor, Tensor]:
        """Indices (B, T) and their output gradients (B, T, d), zero at padding."""
        indices = saved[0]
        assert indices is not None
        indices = indices.reshape(indices.shape[0], -1)
        g = upcast(g).reshape(*indices.shape, g.shape[-1])
        if self.module.padding_idx is not None:
            g = g.masked_fill((indices == self.module.padding_idx).unsqueeze(-1), 0)
        return indices, g

    def stack(self, calls: Sequence[tuple[Saved, Tensor]]) -> tuple[Saved, Tensor]:
        """All indices of an example in a row, (B, ΣT), and their output gradients (B, ΣT, d)."""
        indices, gradients = zip(*(self.rows(saved, g) for saved, g in calls), strict=True)
        return (torch.cat(indices, 1),), torch.cat(gradients, 1)

    def outer_products(self, saved: Saved, g: Tensor) -> OuterProducts:
        return OuterProducts(*self.rows(saved, g))

    def squared_norms(self, saved: Saved, g: Tensor, wanted: Wanted, context: RuleContext) -> Tensor:
        indices, g = self.rows(saved, g)
        order = indices.argsort(dim=1)
        ordered = indices.gather(1, order)
        first = F.pad(ordered[:, 1:] != ordered[:, :-1], (1, 0)).cumsum(1)  # which of its distinct indices, from 0
        slots = torch.empty_like(order).scatter_(1, order, first)
        slots += torch.arange(len(slots), device=slots.device).unsqueeze(1) * slots.shape[1]
        sums = g.new_zeros(g.shape).flatten(0, 1).index_add_(0, slots.flatten(), g.flatten(0, 1))
        slack = second_product_slack(torch.ones_like(indices, dtype=g.dtype), g, g.shape[1])
        return squared_row_norms(sums.view(g.shape)) + slack

    def book_keep(self, saved: Saved, g: Tensor, wanted: Wanted, context: RuleContext) -> tuple[Terms | Tensor, Finish]:
        squares, whole = super().book_keep(saved, g, wanted, context)
        return squares, IndexedSum(whole, partial(self.weighted_rows, saved, g))

    def weighted_rows(self, saved: Saved, g: Tensor, factors: Tensor) -> tuple[Tensor, Tensor]:
        """Indices (B·T,) and factor_i times their output gradients, (B·T, d)."""
        indices, g = self.rows(saved, g)
        return indices.flatten(), scale_rows(g, factors).flatten(0, 1)

    def weighted_sum(
        self, saved: Saved, g: Tensor, factors: Tensor | None, wanted: Wanted, context: RuleContext
    ) -> Gradients:
        indices, g = self.rows(saved, g)
        padding = -1 if self.module.padding_idx is None else self.module.padding_idx
        rows = scale_rows(g, factors)
        return (torch.ops.aten.embedding_dense_backward(rows, indices, self.module.num_embeddings, padding, False),)

    def per_example_gradients(self, saved: Saved, g: Tensor, wanted: Wanted) -> Gradients:
        indices, g = self.rows(saved, g)
        rows = g.new_zeros(g.shape[0], self.module.num_embeddings, g.shape[2])
        return (rows.scatter_add_(1, indices.unsqueeze(-1).expand_as(g), g),)


def embedding_bag(
    weights: Weights,
    module: nn.EmbeddingBag,
    input: Tensor,
    offsets: Tensor | None = None,
    per_sample_weights: Tensor | None = None,
) -> Tensor:
    """What `nn.EmbeddingBag` computes.

    Args:
        weights: the uses of the module's parameters.
        module: the layer.
        input: indices, (B, L), or (N,) with offsets.
        offsets: where each bag begins in the input, (B,), or (B + 1,) with `include_last_offset`.
        per_sample_weights: factors of the rows, like the input; for mode "sum".

    Returns:
        Sums, means or maxima over the bags, (B, d); zeros for an empty one.

    Raises:
        UserError: shapes that do not fit, factors for another mode, or what `refuse_embedding` names.
    """
    reason = refuse_embedding(module)
    if reason:
        raise UserError(f"EmbeddingBag cannot be clipped: {reason}.")
    if per_sample_weights is not None and (module.mode != "sum" or per_sample_weights.shape != input.shape):
        raise UserError(
            f"EmbeddingBag got per_sample_weights of {tuple(per_sample_weights.shape)} with mode={module.mode!r}: they "
            f"go with mode='sum', one for each of the input's {tuple(input.shape)}."
        )
    if input.dim() != (2 if offsets is None else 1):
        raise UserError(
            f"EmbeddingBag got an input of shape {tuple(input.shape)} with{'out' * (offsets is None)} offsets: "
            "give two axes, bags by places, or one axis and offsets."
        )
    factors, fill = per_sample_weights, module.padding_idx or 0
    if offsets is None:
        inside = torch.ones_like(input, dtype=torch.bool)
    else:
        places, inside = _places(input, offsets, module.include_last_offset)
        input = torch.where(inside, nn.functional.pad(input, (0, 1), value=fill)[places], fill)
        factors = None if factors is None else nn.functional.pad(factors, (0, 1))[places]
    if module.padding_idx is not None:
        inside = inside & (input != module.padding_idx)
    rows = weights.embedding(input, "weight", module.padding_idx)
    present = inside.unsqueeze(2)
    if module.mode == "max":
        most = rows.masked_fill(~present, -torch.inf).max(1).values
        return torch.where(inside.any(1, keepdim=True), most, 0.0)
    total = (rows if factors is None else rows * factors.unsqueeze(2)).masked_fill(~present, 0).sum(1)
    return total / inside.sum(1, keepdim=True).clamp_min(1) if module.mode == "mean" else total


def refuse_embedding(module: nn.Embedding | nn.EmbeddingBag) -> str | None:
    """Why this very layer cannot be clipped, or None."""
    if module.max_norm is not None:
        return "max_norm rewrites rows of the weight during forward, outside the private mechanism"
    if module.scale_grad_by_freq:
        return "scale_grad_by_freq divides by counts over the whole batch and so mixes examples"
    if module.sparse:
        return "sparse gradients cannot carry noise, which is dense: build it with sparse=False"
    return None


EMBEDDING_BAG: dict[type[nn.Module], Forward] = {nn.EmbeddingBag: embedding_bag}


def _places(input: Tensor, offsets: Tensor, include_last: bool) -> tuple[Tensor, Tensor]:
    """Where the bags' parts are in an input of N, (B, longest), N where there is none; and whether there is one."""
    n = len(input)
    ends = offsets[1:] if include_last else torch.cat([offsets[1:], offsets.new_tensor([n])])
    starts = offsets[:-1] if include_last else offsets
    if offsets.dim() != 1 or len(starts) == 0:
        raise UserError(
            f"EmbeddingBag got offsets of shape {tuple(offsets.shape)}: give one for each bag, and with "
            "include_last_offset the end of the last."
        )
    shortest, longest, first, last = torch.stack([*torch.aminmax(ends - starts), starts[0], ends[-1]]).tolist()
    if shortest < 0 or first != 0 or last > n:
        raise UserError(
            f"EmbeddingBag got offsets that do not divide an input of {n}: they begin with 0 and never decrease."
        )
    steps = torch.arange(max(longest, 1), device=input.device)
    inside = steps < (ends - starts).unsqueeze(1)
    return torch.where(inside, starts.unsqueeze(1) + steps, n), inside
