"""Weight-standardised convolution: norms through the standardisation, in closed form.

For a filter w with K weights let ŵ = s·(w - mean w), s = max(Σ(w - mean w)², eps)^(-½), and let G be one example's
gradient for the filter used, gain·ŵ. Then the gradient for w is gain·s·(G - mean G - a·⟨G, ŵ⟩·ŵ) and that for the gain
is ⟨G, ŵ⟩, where a is 1, or 0 where eps holds s fixed. As ŵ has mean 0 (and norm 1 where a = 1), the squared norm is
(gain·s)²·(‖G‖² - (ΣG)²/K - a·⟨G, ŵ⟩²): three numbers a filter, and the map is linear, so sums go through it once.
"""

from typing import ClassVar

import torch
from torch import Tensor, nn

from groupwise.clipping.layers import STANDARDIZATION_EPS, WSConv2d, standardize_weight
from groupwise.clipping.rules.base import Gradients, Saved, Wanted, register_rule, upcast
from groupwise.clipping.rules.conv import ConvRule


@register_rule
class WSConv2dRule(ConvRule):
    """`groupwise.clipping.WSConv2d`: weight (p, c/groups, kh, kw), bias (p,), gain (p,)."""

    layer_type: ClassVar[type[nn.Module]] = WSConv2d
    parameter_names: ClassVar[tuple[str, ...]] = ("weight", "bias", "gain")

    def forward(self, x: Tensor, *parameters: Tensor | None) -> tuple[Tensor, Saved]:
        weight, bias, gain = parameters
        assert weight is not None
        standard, scale = standardize_weight(upcast(weight))
        used = standard if gain is None else standard * gain.view(-1, 1, 1, 1)
        used = used.to(x.dtype)
        return self._convolve(x, used, bias), (x, used, self._flatten(standard), scale.flatten(), gain)

    def _wants_weights(self, wanted: Wanted) -> bool:
        return wanted[0] or wanted[2]

    def _by_gram(self, x: Tensor, gradient: Tensor) -> bool:
        return False  # the closed form needs G itself

    def _terms(self, saved: Saved) -> tuple[Tensor, Tensor, Tensor]:
        """Standardised filters ŵ (p, K), gain·s (p,), and a (p,): 1 where the scale depends on the weight."""
        _, _, standard, scale, gain = saved
        assert standard is not None and scale is not None
        active = (scale < STANDARDIZATION_EPS**-0.5).to(scale.dtype)
        return standard, scale if gain is None else scale * upcast(gain), active

    def _squares(self, saved: Saved, rows: Tensor, wanted: Wanted) -> Tensor:
        standard, scale, active = self._terms(saved)
        along = torch.einsum("npk,pk->np", rows, standard)
        total = rows.new_zeros(rows.shape[0])
        if wanted[0]:
            across = rows.square().sum(2) - rows.sum(2).square() / rows.shape[2] - active * along.square()
            total = total + (scale.square() * across.clamp_min(0)).sum(1)
        return total + along.square().sum(1) if wanted[2] else total

    def _finish(self, saved: Saved, weights: Tensor | None, bias: Tensor | None, wanted: Wanted) -> Gradients:
        if weights is None:
            return None, bias, None
        standard, scale, active = self._terms(saved)
        along = (weights * standard).sum(1)
        weight = None
        if wanted[0]:
            across = weights - weights.mean(1, keepdim=True) - (active * along).unsqueeze(1) * standard
            weight = self._unflatten(across * scale.unsqueeze(1))
        return weight, bias, along if wanted[2] else None
