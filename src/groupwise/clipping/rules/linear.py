"""Linear layers: `nn.Linear` on inputs of any number of axes, and the shared mathematics of HF's `Conv1D`.

One example's weight gradient is GᵀX for inputs X (T, d) and output gradients G (T, p), T the product of all axes
between batch and features. Its squared norm is Σ (XXᵀ)∘(GGᵀ) (Gram: T²(p+d) operations, T² memory) or the norm of
GᵀX itself (materialised: T·p·d operations, p·d memory); the bias adds 1 to every entry of XXᵀ. In a group of its own a
layer that materialises needs no second product for its clipped sum.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from groupwise.clipping.costs import Work
from groupwise.clipping.factors import add_weighed_rows, drop_zero_rows
from groupwise.clipping.rules.base import (
    Clip,
    Finish,
    Gradients,
    LayerRule,
    Saved,
    Wanted,
    chunk_floats,
    numbers,
    register_rule,
    second_product_slack,
    sum_of_squares,
    upcast,
)
from groupwise.clipping.rules.gram import gram_norms
from groupwise.clipping.rules.per_example import weigh_gradients
from groupwise.clipping.squared_norms import floor, squared_row_norms

THIN = 1 << 18
"""Weights of so few numbers (low-rank adapters) are formed the faster way round, and turned when they are done."""


@register_rule
class LinearRule(LayerRule):
    """`nn.Linear`: weight (p, d), bias (p,)."""

    layer_type: ClassVar[type[nn.Module]] = nn.Linear
    parameter_names: ClassVar[tuple[str, ...]] = ("weight", "bias")
    features_last: ClassVar[bool] = True
    stacks: ClassVar[bool] = True
    transposed: ClassVar[bool] = False
    """The weight is stored as (d, p)."""

    def forward(self, x: Tensor, *parameters: Tensor | None) -> tuple[Tensor, Saved]:
        weight, bias = parameters
        assert weight is not None
        return F.linear(x, weight.t() if self.transposed else weight, bias), (x, weight)

    def arrange(self, saved: Saved, g: Tensor) -> Tensor:
        return g.contiguous()

    def input_gradient(self, saved: Saved, g: Tensor) -> Tensor:
        _, weight = saved
        assert weight is not None
        return g @ (weight.t() if self.transposed else weight)

    def rows(self, saved: Saved, g: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs (B, T, d) and output gradients (B, T, p)."""
        x = saved[0]
        assert x is not None
        return _as_rows(upcast(x)), _as_rows(upcast(g))

    def stack(self, calls: Sequence[tuple[Saved, Tensor]]) -> tuple[Saved, Tensor]:
        """Calls one after the other along the sequence: (B, ΣT, d) and (B, ΣT, p)."""
        inputs, gradients = zip(*(self.rows(saved, g) for saved, g in calls), strict=True)
        return (torch.cat(inputs, 1), calls[0][0][1]), torch.cat(gradients, 1)

    def _materializes(self, x: Tensor, g: Tensor) -> bool:
        """Whether the gradients themselves are the cheaper way to norms and clipped sum."""
        (b, t, d), p = x.shape, g.shape[2]
        once = self.alone or b * d * p <= numbers(x, g)  # fused, or kept
        return self.choices.choose(((b, t, d), (b, t, p), once), x.device, partial(_ways, b, t, d, p, once)) != "gram"

    def squared_norms(self, saved: Saved, g: Tensor, wanted: Wanted) -> Tensor:
        x, g = self.rows(saved, g)
        weight_wanted, bias_wanted = wanted
        if not weight_wanted:
            return squared_row_norms(g.sum(1))
        if x.shape[1] == 1:
            left, right = squared_row_norms(x) + floor(x), squared_row_norms(g) + floor(g)
            return (left.add_(1) if bias_wanted else left) * right
        if self._materializes(x, g):
            squares = torch.cat([sum_of_squares(part) for part in self._materialized(x, g, bias_wanted)])
            return squares + second_product_slack(x, g, x.shape[1])
        return gram_norms(x, g, bias_wanted, self.shared.products)

    def weighted_sum(self, saved: Saved, g: Tensor, factors: Tensor | None, wanted: Wanted) -> Gradients:
        x, g = self.rows(saved, g)
        weights = None if factors is None else factors.to(g.dtype)
        x, g = drop_zero_rows(factors, x), drop_zero_rows(factors, g)
        weight = bias = None
        if wanted[1]:  # over positions first: as the norms have it, and long sums of products round more
            bias = g.sum((0, 1)) if weights is None else weights @ g.sum(1)
        if weights is not None and x.shape[1] > 1:
            weights = weights.repeat_interleave(x.shape[1])
        x, g = x.flatten(0, 1), g.flatten(0, 1)
        if wanted[0]:
            if weights is not None:  # the smaller of the two is scaled
                x, g = (self._scaled(x, weights), g) if x.shape[1] <= g.shape[1] else (x, self._scaled(g, weights))
            left, right = self._sides(x, g)
            weight = self._turned(left.t() @ right)
        return weight, bias

    def clipped_sum(self, saved: Saved, g: Tensor, clip: Clip, wanted: Wanted) -> Gradients:
        x, rows = self.rows(saved, g)
        if not wanted[0] or x.shape[1] == 1 or not self._materializes(x, rows):
            return super().clipped_sum(saved, g, clip, wanted)
        weight = bias = None
        for weights, biases in self._materialized(x, rows, wanted[1]):
            factors = clip(sum_of_squares((weights, biases)))
            weight = add_weighed_rows(weight, factors, weights)
            bias = None if biases is None else add_weighed_rows(bias, factors, biases)
        assert weight is not None
        return self._turned(weight), bias

    def book_keep(self, saved: Saved, g: Tensor, wanted: Wanted) -> tuple[Tensor, Finish]:
        x, rows = self.rows(saved, g)
        small = x.shape[0] * x.shape[2] * rows.shape[2] <= numbers(x, rows)
        if not wanted[0] or x.shape[1] == 1 or not small or not self._materializes(x, rows):
            return super().book_keep(saved, g, wanted)
        left, right = self._sides(x, rows)
        kept = (left.mT @ right, rows.sum(1) if wanted[1] else None)

        def finish(factors: Tensor) -> Gradients:
            weight, bias = weigh_gradients(kept, factors)
            assert weight is not None
            return self._turned(weight), bias

        return sum_of_squares(kept), finish

    def per_example_gradients(self, saved: Saved, g: Tensor, wanted: Wanted) -> Gradients:
        x, g = self.rows(saved, g)
        weight = (x.mT @ g if self.transposed else g.mT @ x) if wanted[0] else None
        return weight, g.sum(1) if wanted[1] else None

    def _scaled(self, rows: Tensor, weights: Tensor) -> Tensor:
        return torch.mul(rows, weights.unsqueeze(1), out=self.shared.rooms.take("scaled", rows, *rows.shape))

    def _inputs_first(self, d: int, p: int) -> bool:
        """Whether gradients are formed as XᵀG (d, p): as the weight is stored, or the wide way for thin layers."""
        return d <= p if d * p <= THIN else self.transposed

    def _sides(self, x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        return (x, g) if self._inputs_first(x.shape[-1], g.shape[-1]) else (g, x)

    def _turned(self, weight: Tensor) -> Tensor:
        """A gradient formed from `_sides`, as the weight is stored."""
        rows, columns = self.module.get_parameter("weight").shape
        d, p = (rows, columns) if self.transposed else (columns, rows)
        return weight if self._inputs_first(d, p) == self.transposed else weight.t()

    def _materialized(self, x: Tensor, g: Tensor, bias: bool) -> Iterator[tuple[Tensor, Tensor | None]]:
        """Gradients of the weight (before `_turned`) and the bias (n, p), a few examples at a time, in one buffer."""
        step = min(len(x), max(1, chunk_floats(x) // (x.shape[2] * g.shape[2])))
        left, right = self._sides(x, g)
        if step == len(x):
            yield torch.bmm(left.mT, right), g.sum(1) if bias else None
            return
        buffer = self.shared.rooms.take("gradients", x, step, left.shape[2], right.shape[2])
        for a, b, rows in zip(left.split(step), right.split(step), g.split(step), strict=True):
            yield torch.bmm(a.mT, b, out=buffer[: len(a)]), rows.sum(1) if bias else None


def _ways(b: int, t: int, d: int, p: int, once: bool) -> dict[str, Work]:
    """What both formulas cost for inputs (b, t, d) and output gradients (b, t, p), the weighted sum included.

    `once`: materialised gradients are still there when the factors are known, so no second product is needed.
    """
    product = 2.0 * b * t * d * p
    scaling = 8.0 * b * t * min(d, p)
    gradients = 4.0 * b * d * p
    return {
        "gram": Work(matmul=product, gram=2.0 * b * t * t * (p + d), bytes=scaling + 24.0 * b * t * t),
        "materialize": Work(outer=product, bytes=3 * gradients)
        if once
        else Work(outer=product, matmul=product, bytes=2 * gradients + scaling),
    }


def _as_rows(t: Tensor) -> Tensor:
    """(B, ..., n) -> (B, T, n)."""
    return t.unsqueeze(1) if t.dim() == 2 else t.reshape(t.shape[0], -1, t.shape[-1])
