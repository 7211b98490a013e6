"""Weight-standardised convolution: norms through the standardisation, in closed form.

For a filter w with K weights let ŵ = s·(w - mean w), s = max(Σ(w - mean w)², eps)^(-½), and let G be one example's
gradient for the filter used, gain·ŵ. Then the gradient for w is gain·s·(G - mean G - a·⟨G, ŵ⟩·ŵ) and that for the gain
is ⟨G, ŵ⟩, where a is 1, or 0 where eps holds s fixed. As ŵ has mean 0 (and norm 1 where a = 1), the squared norm is
(gain·s)²·(‖G‖² - (ΣG)²/K - a·⟨G, ŵ⟩²): three numbers a filter, and the map is linear, so sums go through it once.
"""

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from groupwise.clipping.factors import may_ask
from groupwise.clipping.layers import STANDARDIZATION_EPS, WSConv2d, standardize_weight
from groupwise.clipping.products import inner_products, self_products
from groupwise.clipping.rules.base import Gradients, Saved, Wanted, register_rule, rounding_slack, upcast
from groupwise.clipping.rules.conv import ConvRule, positions_first
from groupwise.clipping.rules.gram import norms_from_products
from groupwise.clipping.squared_norms import squared_row_norms

LEAST_GAIN = 1e-3
"""Outputs are divided by the gain to find ⟨G, ŵ⟩; below this the gradients are materialised instead."""


@register_rule
class WSConv2dRule(ConvRule):
    """`groupwise.clipping.WSConv2d`: weight (p, c/groups, kh, kw), bias (p,), gain (p,)."""

    layer_type: ClassVar[type[nn.Module]] = WSConv2d
    parameter_names: ClassVar[tuple[str, ...]] = ("weight", "bias", "gain")
    batched: ClassVar[tuple[int, ...]] = (0, 6)

    def forward(self, x: Tensor, *parameters: Tensor | None) -> tuple[Tensor, Saved]:
        weight, bias, gain = parameters
        assert weight is not None
        standard, scale = standardize_weight(upcast(weight))
        used = standard if gain is None else standard * gain.view(-1, 1, 1, 1)
        used = used.to(x.dtype)
        y = self._convolve(x, used, bias)
        keeps = not self.thrifty and y.dtype == weight.dtype and self._divides(gain)
        kept = y if keeps and self._way((x,), y.shape) == "gram" else None
        return y, (x, used, self._flatten(standard), scale.flatten(), gain, bias, kept)

    def _divides(self, gain: Tensor | None) -> bool:
        """Whether outputs divided by their gains can be trusted; a GPU is not asked."""
        return gain is None or (may_ask(gain) and float(gain.detach().abs().min()) > LEAST_GAIN)

    def _way(self, saved: Saved, out: torch.Size) -> str:
        way = super()._way(saved, out)
        if way == "gram" and len(saved) > 1 and saved[-1] is None:  # the output was not kept
            return "materialize"
        return way

    def _wants_weights(self, wanted: Wanted) -> bool:
        return wanted[0] or wanted[2]

    def _scales(self, saved: Saved) -> tuple[Tensor, Tensor, Tensor]:
        """Standardised filters ŵ (p, K), gain·s (p,), and a (p,): 1 where the scale depends on the weight."""
        standard, scale, gain = saved[2:5]
        assert standard is not None and scale is not None
        active = (scale < STANDARDIZATION_EPS**-0.5).to(scale.dtype)
        return standard, scale if gain is None else scale * upcast(gain), active

    def _squares_from_products(self, saved: Saved, g: Tensor, wanted: Wanted) -> Tensor:
        """The same three numbers a filter without G: ⟨G, ŵ⟩ from the output, ΣG from sums over windows of the input.

        Each is moved by its own rounding towards the larger norm.
        """
        x, _, _, _, gain, bias, y = saved
        assert x is not None and y is not None
        _, scale, active = self._scales(saved)
        gain = torch.ones_like(scale) if gain is None else upcast(gain)
        rows, k = positions_first(g), self._filter_size()
        longest = max(rows.shape[1], k, rows.shape[2])
        between = self._products(saved, g)
        lengths = between.diagonal(dim1=1, dim2=2).clamp_min(0).sqrt().unsqueeze(1)
        ones = x.new_ones(1, 1, *self.module.kernel_size, dtype=rows.dtype)
        shape = self._geometry
        windows = F.conv2d(upcast(x).sum(1, keepdim=True), ones, None, shape.stride, shape.padding, shape.dilation)
        total = inner_products(windows.flatten(2), rows.mT).squeeze(1)  # (B, p): ΣG
        along, size = (rows * positions_first(y)).sum(1), torch.bmm(lengths, rows.abs()).squeeze(1)
        if bias is not None:
            along = along - upcast(bias) * rows.sum(1)
            size = size + upcast(bias).abs() / gain.abs() * rows.abs().sum(1)
        along, slack = along / gain, rounding_slack(size, longest)
        squares = rows.new_zeros(len(rows))
        if wanted[0]:
            weighed = rows * scale
            whole = norms_from_products(between, self_products(weighed), False, longest)
            removed = (total.abs() / k**0.5 - slack).clamp_min(0).square()
            removed = removed + active * (along.abs() - slack).clamp_min(0).square()
            squares = (whole - removed @ scale.square()).clamp_min(0)
        return squares + squared_row_norms(along.abs() + slack) if wanted[2] else squares

    def _slack_of_sums(self, saved: Saved, g: Tensor) -> Tensor:
        scale = self._scales(saved)[1]  # the map from G to the gradients of weight and gain lengthens by no more
        return super()._slack_of_sums(saved, g) * (scale.square().amax().double() + 1)

    def _terms(self, saved: Saved) -> tuple[Tensor, ...]:
        """ŵ (p, 1, K), (gain·s)² and a, (p,) in float64."""
        standard, scale, active = self._scales(saved)
        return standard.unsqueeze(1), scale.double().square(), active.double()

    def _squares(self, terms: tuple[Tensor, ...], rows: Tensor, wanted: Wanted) -> Tensor:
        standard, scale_squared, active = terms
        along = inner_products(standard, rows.transpose(0, 1)).squeeze(1).double().square()  # (p, n): ⟨G, ŵ⟩²
        squares = along.new_zeros(rows.shape[0])
        if wanted[0]:
            whole = squared_row_norms(rows.flatten(0, 1)).view(rows.shape[:2]).t()
            across = whole - rows.sum(2).t().double().square() / rows.shape[2] - active.unsqueeze(1) * along
            across = across.clamp_min_(0) + rounding_slack(whole, rows.shape[2], rows.dtype)
            squares = scale_squared @ across
        return squares + along.sum(0) if wanted[2] else squares

    def _finish(self, saved: Saved, weights: Tensor | None, bias: Tensor | None, wanted: Wanted) -> Gradients:
        if weights is None:
            return None, bias, None
        standard, scale, active = self._scales(saved)
        along = (weights * standard).sum(1)
        weight = None
        if wanted[0]:
            across = weights - weights.mean(1, keepdim=True) - (active * along).unsqueeze(1) * standard
            weight = self._unflatten(across * scale.unsqueeze(1))
        return weight, bias, along if wanted[2] else None
