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
from groupwise.clipping.rules.base import Gradients, Saved, Wanted, register_rule, rounding_slack, upcast
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

    def _by_gram(self, g: Tensor) -> bool:
        return False  # the closed form needs G itself

    def _scales(self, saved: Saved) -> tuple[Tensor, Tensor, Tensor]:
        """Standardised filters ŵ (p, K), gain·s (p,), and a (p,): 1 where the scale depends on the weight."""
        _, _, standard, scale, gain = saved
        assert standard is not None and scale is not None
        active = (scale < STANDARDIZATION_EPS**-0.5).to(scale.dtype)
        return standard, scale if gain is None else scale * upcast(gain), active

    def _terms(self, saved: Saved) -> tuple[Tensor, ...]:
        """ŵ (p, K); ŵ and ones (p, K, 2), for two inner products in one pass; (gain·s)² and a, (p,); room (2, p, K)."""
        standard, scale, active = self._scales(saved)
        pairs = torch.stack((standard, torch.ones_like(standard)), dim=2)
        return standard, pairs, scale.square(), active, standard.new_empty(2, *standard.shape)

    def _squares(self, terms: tuple[Tensor, ...], rows: Tensor, wanted: Wanted) -> Tensor:
        standard, pairs, scale_squared, active, room = terms
        if len(rows) > 2:
            along, total = torch.bmm(rows.transpose(0, 1), pairs).unbind(2)  # (p, n): ⟨G, ŵ⟩ and ΣG
        else:  # too thin for a matrix product
            along, total = torch.mul(rows, standard, out=room[: len(rows)]).sum(2).t(), rows.sum(2).t()
        along = along.square()
        squares = rows.new_zeros(rows.shape[0])
        if wanted[0]:
            whole = torch.linalg.vector_norm(rows, dim=2).square()
            across = whole.t() - total.square() / rows.shape[2] - active.unsqueeze(1) * along
            across = across.clamp_min(0) + rounding_slack(whole.t(), rows.shape[2])
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
