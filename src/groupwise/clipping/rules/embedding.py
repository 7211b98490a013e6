"""Clips embeddings: one example's gradient sums the output gradients of equal indices, without one-hot matrices."""

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from groupwise.clipping.factors import scale_rows
from groupwise.clipping.gram import OuterProducts
from groupwise.clipping.precision import inflate_norms, squared_row_norms, upcast
from groupwise.clipping.rules.base import Gradients, LayerRule, Saved, Wanted, register_rule


@register_rule
class EmbeddingRule(LayerRule):
    """`nn.Embedding`: weight (V, d); rows of `padding_idx` get no gradient."""

    layer_type: ClassVar[type[nn.Module]] = nn.Embedding
    parameter_names: ClassVar[tuple[str, ...]] = ("weight",)
    autocast: ClassVar = "keep"
    features_last: ClassVar[bool] = True
    stacks: ClassVar[bool] = True
    indexed: ClassVar[bool] = True
    module: nn.Embedding

    @classmethod
    def handles(cls, module: nn.Module) -> bool:
        """As in `LayerRule`, but not with options that cannot be clipped: `products.embedding` refuses these."""
        options = ("max_norm", "scale_grad_by_freq", "sparse")
        return super().handles(module) and not any(getattr(module, name) for name in options)

    def forward(self, x: Tensor, *parameters: Any) -> tuple[Tensor, Saved]:
        (weight,) = parameters
        return F.embedding(x, weight, self.module.padding_idx), (x,)

    def input_gradient(self, saved: Saved, g: Tensor) -> None:
        return None

    def rows(self, saved: Saved, g: Tensor) -> tuple[Tensor, Tensor]:
        """Indices (B, T) and their output gradients (B, T, d), zero at padding."""
        indices = saved[0]
        indices = indices.reshape(indices.shape[0], -1)
        g = upcast(g).reshape(*indices.shape, g.shape[-1])
        if self.module.padding_idx is not None:
            g = g.masked_fill((indices == self.module.padding_idx).unsqueeze(-1), 0)
        return indices, g

    def outer_products(self, saved: Saved, g: Tensor) -> OuterProducts:
        return OuterProducts(*self.rows(saved, g))

    def squared_norms(self, saved: Saved, g: Tensor, wanted: Wanted) -> Tensor:
        indices, g = self.rows(saved, g)
        lengths = torch.linalg.vector_norm(g, dim=2, dtype=torch.float64)
        slots = distinct(indices.masked_fill(lengths == 0, -1))  # ignore padding
        places = slots + torch.arange(len(slots), device=slots.device).unsqueeze(1) * slots.shape[1]
        sums = g.new_zeros(g.shape).flatten(0, 1).index_add_(0, places.flatten(), g.flatten(0, 1))
        return inflate_norms(squared_row_norms(sums.view(g.shape)), slack_of_repeats(slots, lengths, g.dtype))

    def weighted_rows(self, saved: Saved, g: Tensor, factors: Tensor) -> tuple[Tensor, Tensor]:
        """The weighted sum as indices (B·T,) and the rows to add there, factor_i times output gradients, (B·T, d)."""
        indices, g = self.rows(saved, g)
        return indices.flatten(), scale_rows(g, factors).flatten(0, 1)

    def weighted_sum(self, saved: Saved, g: Tensor, factors: Tensor | None, wanted: Wanted) -> Gradients:
        indices, g = self.rows(saved, g)
        padding = -1 if self.module.padding_idx is None else self.module.padding_idx
        rows = scale_rows(g, factors)
        return (torch.ops.aten.embedding_dense_backward(rows, indices, self.module.num_embeddings, padding, False),)

    def per_example_gradients(self, saved: Saved, g: Tensor, wanted: Wanted) -> Gradients:
        indices, g = self.rows(saved, g)
        rows = g.new_zeros(g.shape[0], self.module.num_embeddings, g.shape[2])
        return (rows.scatter_add_(1, indices.unsqueeze(-1).expand_as(g), g),)


def distinct(indices: Tensor) -> Tensor:
    """Number the distinct indices of each row, from 0: (B, T) -> (B, T)."""
    order = indices.argsort(dim=1)
    ordered = indices.gather(1, order)
    first = F.pad(ordered[:, 1:] != ordered[:, :-1], (1, 0)).cumsum(1)
    return torch.empty_like(order).scatter_(1, order, first)


def slack_of_repeats(slots: Tensor, lengths: Tensor, dtype: torch.dtype) -> Tensor:
    """The rounding slack of norms (B,): gradients of equal indices are added one by one, for the norm and for the sum.

    The error of a sum of m terms is at most 4·√m·eps times the sum of their lengths, or m·eps/4 times if all are equal;
    the sum of their lengths is at most √m times the root of the sum of their squares.

    `slots`, (B, T), numbers the distinct indices of each example. `lengths`, (B, T), are the norms of the output
    gradients, float64. `dtype` is that of the additions.
    """
    many = torch.zeros_like(lengths).scatter_(1, slots, 1.0, reduce="add").gather(1, slots)
    least = torch.finfo(dtype).eps / 4
    return torch.linalg.vector_norm(many * lengths * many.clamp_min(256).sqrt_(), dim=1).mul_(least)
