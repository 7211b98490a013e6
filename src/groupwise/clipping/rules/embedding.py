"""Embedding: one example's gradient adds the output gradients of equal indices; nothing is ever one-hot."""

from collections.abc import Sequence
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from groupwise.clipping.factors import scale_rows
from groupwise.clipping.rules.base import (
    Gradients,
    LayerRule,
    Saved,
    Wanted,
    register_rule,
    second_product_slack,
    upcast,
)
from groupwise.clipping.squared_norms import squared_row_norms


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
        if self.module.max_norm is not None:
            return "max_norm rewrites rows of the weight during forward, outside the private mechanism"
        if self.module.scale_grad_by_freq:
            return "scale_grad_by_freq divides by counts over the whole batch and so mixes examples"
        if self.module.sparse:
            return "sparse gradients cannot carry noise, which is dense: build it with sparse=False"
        return None

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

    def squared_norms(self, saved: Saved, g: Tensor, wanted: Wanted) -> Tensor:
        indices, g = self.rows(saved, g)
        order = indices.argsort(dim=1)
        ordered = indices.gather(1, order)
        first = F.pad(ordered[:, 1:] != ordered[:, :-1], (1, 0)).cumsum(1)  # which of its distinct indices, from 0
        slots = torch.empty_like(order).scatter_(1, order, first)
        slots += torch.arange(len(slots), device=slots.device).unsqueeze(1) * slots.shape[1]
        sums = g.new_zeros(g.shape).flatten(0, 1).index_add_(0, slots.flatten(), g.flatten(0, 1))
        slack = second_product_slack(torch.ones_like(indices, dtype=g.dtype), g, g.shape[1])
        return squared_row_norms(sums.view(g.shape)) + slack

    def weighted_sum(self, saved: Saved, g: Tensor, factors: Tensor | None, wanted: Wanted) -> Gradients:
        indices, g = self.rows(saved, g)
        padding = -1 if self.module.padding_idx is None else self.module.padding_idx
        rows = scale_rows(g, factors)
        return (torch.ops.aten.embedding_dense_backward(rows, indices, self.module.num_embeddings, padding, False),)

    def per_example_gradients(self, saved: Saved, g: Tensor, wanted: Wanted) -> Gradients:
        indices, g = self.rows(saved, g)
        rows = g.new_zeros(g.shape[0], self.module.num_embeddings, g.shape[2])
        return (rows.scatter_add_(1, indices.unsqueeze(-1).expand_as(g), g),)
