"""Linear layers: `nn.Linear` on inputs of any number of axes, and the shared mathematics of HF's `Conv1D`.

One example's weight gradient is GᵀX for inputs X (T, d) and output gradients G (T, p), T the product of all axes
between batch and features. Its squared norm is Σ (XXᵀ)∘(GGᵀ) (Gram: T²(p+d) operations, T² memory) or the norm of
GᵀX itself (materialised: T·p·d operations, p·d memory); the bias adds 1 to every entry of XXᵀ.
"""

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from groupwise.clipping.factors import drop_zero_rows, scale_rows, weigh_rows
from groupwise.clipping.rules.base import (
    Clip,
    Gradients,
    LayerRule,
    Saved,
    Wanted,
    register_rule,
    rounding_slack,
    upcast,
)


@register_rule
class LinearRule(LayerRule):
    """`nn.Linear`: weight (p, d), bias (p,)."""

    layer_type: ClassVar[type[nn.Module]] = nn.Linear
    parameter_names: ClassVar[tuple[str, ...]] = ("weight", "bias")
    transposed: ClassVar[bool] = False
    """The weight is stored as (d, p)."""

    def forward(self, x: Tensor, *parameters: Tensor | None) -> tuple[Tensor, Saved]:
        weight, bias = parameters
        assert weight is not None
        return F.linear(x, weight.t() if self.transposed else weight, bias), (x, weight)

    def input_gradient(self, saved: Saved, g: Tensor) -> Tensor:
        _, weight = saved
        assert weight is not None
        return g @ (weight.t() if self.transposed else weight)

    def rows(self, saved: Saved, g: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs (B, T, d) and output gradients (B, T, p)."""
        x = saved[0]
        assert x is not None
        return _as_rows(upcast(x)), _as_rows(upcast(g))

    def _by_gram(self, x: Tensor, g: Tensor) -> bool:
        (t, d), p = x.shape[1:], g.shape[2]
        return t * (p + d) < p * d if self.formula == "auto" else self.formula == "gram"

    def squared_norms(self, saved: Saved, g: Tensor, wanted: Wanted) -> Tensor:
        x, g = self.rows(saved, g)
        weight_wanted, bias_wanted = wanted
        if not weight_wanted:
            return g.sum(1).square().sum(1)
        if x.shape[1] == 1:
            return (x.square().sum((1, 2)) + float(bias_wanted)) * g.square().sum((1, 2))
        if self._by_gram(x, g):
            return gram_norms(x, g, bias_wanted)
        square = (g.mT @ x).flatten(1).square().sum(1)
        return square + g.sum(1).square().sum(1) if bias_wanted else square

    def weighted_sum(self, saved: Saved, g: Tensor, factors: Tensor | None, wanted: Wanted) -> Gradients:
        x, g = self.rows(saved, g)
        g = scale_rows(g, factors).flatten(0, 1)
        weight = bias = None
        if wanted[0]:
            x = drop_zero_rows(factors, x).flatten(0, 1)
            weight = x.t() @ g if self.transposed else g.t() @ x
        if wanted[1]:
            bias = g.sum(0)
        return weight, bias

    def clipped_sum(self, saved: Saved, g: Tensor, clip: Clip, wanted: Wanted) -> Gradients:
        x, rows = self.rows(saved, g)
        if not wanted[0] or x.shape[1] == 1 or self._by_gram(x, rows):
            return super().clipped_sum(saved, g, clip, wanted)
        weights = x.mT @ rows if self.transposed else rows.mT @ x
        square = weights.flatten(1).square().sum(1)
        if not wanted[1]:
            return weigh_rows(clip(square), weights), None
        biases = rows.sum(1)
        factors = clip(square + biases.square().sum(1))
        return weigh_rows(factors, weights), weigh_rows(factors, biases)

    def per_example_gradients(self, saved: Saved, g: Tensor, wanted: Wanted) -> Gradients:
        x, g = self.rows(saved, g)
        weight = (x.mT @ g if self.transposed else g.mT @ x) if wanted[0] else None
        return weight, g.sum(1) if wanted[1] else None


def _as_rows(t: Tensor) -> Tensor:
    """(B, ..., n) -> (B, T, n)."""
    return t.unsqueeze(1) if t.dim() == 2 else t.reshape(t.shape[0], -1, t.shape[-1])


def gram_norms(x: Tensor, g: Tensor, bias: bool) -> Tensor:
    """‖GᵀX‖² (+ ‖Σ_t G‖² with bias) of each example from two T×T Gram matrices; x (B, T, d), g (B, T, p) -> (B,)."""
    xx, gg = torch.bmm(x, x.mT), torch.bmm(g, g.mT)
    if bias:
        xx = xx.add_(1)
    sizes = (xx.diagonal(dim1=1, dim2=2) * gg.diagonal(dim1=1, dim2=2)).clamp_min(0).sqrt().sum(1)
    longest = max(x.shape[1], x.shape[2], g.shape[2])
    return xx.mul_(gg).sum((1, 2)).clamp_min_(0) + rounding_slack(sizes.square(), longest)
