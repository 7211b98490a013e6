"""Standardises the weights of a convolution, and clips it: norms go through the standardisation in closed form.

For a filter w with K weights let ŵ = s·(w - mean w), s = max(Σ(w - mean w)², eps)^(-½), and let G be one example's
gradient for the filter used, gain·ŵ. Then the gradient for w is gain·s·(G - mean G - a·⟨G, ŵ⟩·ŵ) and that for the gain
is ⟨G, ŵ⟩, where a is 1, or 0 where eps holds s fixed. As ŵ has mean 0 (and norm 1 where a = 1), the squared norm is
(gain·s)²·(‖G‖² - (ΣG)²/K - a·⟨G, ŵ⟩²): three numbers a filter, and the map is linear, so sums go through it once.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from groupwise.clipping.cost_model import inner_products, norms_from_products, self_products
from groupwise.clipping.factors import is_sync_free
from groupwise.clipping.precision import rounding_slack, squared_row_norms, upcast
from groupwise.clipping.rules.base import Gradients, RuleContext, Saved, Wanted, register_rule
from groupwise.clipping.rules.conv import ConvRule, positions_first

STANDARDIZATION_EPS = 1e-4
LEAST_GAIN = 1e-3
"""Outputs are divided by the gain to find ⟨G, ŵ⟩; below this the gradients are materialised instead."""


def standardize_weight(weight: Tensor, eps: float = STANDARDIZATION_EPS) -> tuple[Tensor, Tensor]:
    """Give each output filter mean 0 and squared norm 1.

    Args:
        weight: filters (p, ...); statistics are taken over all axes but the first.
        eps: floor of a filter's summed squared deviation.

    Returns:
        The standardised weight (same shape) and the scale of each filter, (p, 1, ...).
    """
    centred = weight - weight.mean(dim=tuple(range(1, weight.dim())), keepdim=True)
    scale = centred.square().sum(dim=tuple(range(1, weight.dim())), keepdim=True).clamp_min(eps).rsqrt()
    return centred * scale, scale


class WSConv2d(nn.Conv2d):
    """`nn.Conv2d` whose filters are standardised to mean 0 and norm 1 before use (Qiao et al. 2019).

    De et al. (2022) train WRN16-4 with it; the paper follows them (section 4.1).

    Args:
        gain: learn a factor for each output channel, as De et al. do; the rest are `nn.Conv2d`'s arguments.
    """

    gain: nn.Parameter | None

    def __init__(self, *args: Any, gain: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.padding_mode != "zeros":
            raise ValueError(f"WSConv2d pads with zeros only; padding_mode={self.padding_mode!r} was given.")
        self.register_parameter("gain", nn.Parameter(torch.ones(self.out_channels)) if gain else None)

    def forward(self, x: Tensor) -> Tensor:
        """Convolve x (B, c, H, W) with the standardised filters: (B, p, H', W')."""
        weight, _ = standardize_weight(self.weight)
        if self.gain is not None:
            weight = weight * self.gain.view(-1, 1, 1, 1)
        return F.conv2d(x, weight, self.bias, self.stride, self.padding, self.dilation, self.groups)


@register_rule
class WSConv2dRule(ConvRule):
    """`groupwise.clipping.WSConv2d`: weight (p, c/groups, kh, kw), bias (p,), gain (p,).

    `saved` is (x, weight used, ŵ, s, gain, bias, output); the output tells ⟨G, ŵ⟩ without G.
    """

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
        output = y if y.dtype == weight.dtype else None
        return y, (x, used, self._flatten(standard), scale.flatten(), gain, bias, output)

    def keep(self, saved: Saved, context: RuleContext) -> Saved:
        """The output only where norms go by inner products, which divide it by the gain (a GPU is not asked for it)."""
        gain, y = saved[4], saved[6]
        if y is None:
            return saved
        needed = not context.save_memory and _divides(gain) and self.choose(saved, y, context) == "gram"
        return saved if needed else (*saved[:6], None)

    def way(self, saved: Saved, g: Tensor, context: RuleContext) -> str:
        way = super().way(saved, g, context)
        return "materialize" if way == "gram" and saved[6] is None else way  # the output was not kept

    def uses_weight(self, wanted: Wanted) -> bool:
        """Whether weight or gain count: both come from the gradient of the weight used."""
        return wanted[0] or wanted[2]

    def _scales(self, saved: Saved) -> tuple[Tensor, Tensor, Tensor]:
        """Standardised filters ŵ (p, K), gain·s (p,), and a (p,): 1 where the scale depends on the weight."""
        standard, scale, gain = saved[2:5]
        assert standard is not None and scale is not None
        active = (scale < STANDARDIZATION_EPS**-0.5).to(scale.dtype)
        return standard, scale if gain is None else scale * upcast(gain), active

    def _squares_from_products(self, saved: Saved, g: Tensor, wanted: Wanted, context: RuleContext) -> Tensor:
        """The same three numbers a filter without G: ⟨G, ŵ⟩ from the output, ΣG from sums over windows of the input.

        Each is moved by its own rounding towards the larger norm.
        """
        x, _, _, _, gain, bias, y = saved
        assert x is not None and y is not None
        _, scale, active = self._scales(saved)
        gain = torch.ones_like(scale) if gain is None else upcast(gain)
        rows, k = positions_first(g), self._filter_size()
        longest = max(rows.shape[1], k, rows.shape[2])
        between = self._products(saved, g, context)
        lengths = between.diagonal(dim1=1, dim2=2).clamp_min(0).sqrt().unsqueeze(1)
        ones = x.new_ones(1, 1, *self.module.kernel_size, dtype=rows.dtype)
        shape = self._geometry
        windows = F.conv2d(upcast(x).sum(1, keepdim=True), ones, None, shape.stride, shape.padding, shape.dilation)
        total = inner_products(windows.flatten(2), rows.mT).squeeze(1)  # (B, p): ΣG
        along, size = (rows * positions_first(upcast(y))).sum(1), torch.bmm(lengths, rows.abs()).squeeze(1)
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

    def slack(self, saved: Saved, g: Tensor) -> Tensor:
        scale = self._scales(saved)[1]  # the map from G to the gradients of weight and gain lengthens by no more
        return super().slack(saved, g) * (scale.square().amax().double() + 1)

    def measure(self, saved: Saved, wanted: Wanted) -> Callable[[Tensor], Tensor]:
        """From gradients (n, p, K) of the weight used to squared norms (n,) of weight and gain."""
        standard, scale, active = self._scales(saved)
        return partial(_squares, standard.unsqueeze(1), scale.double().square(), active.double(), wanted)

    def finish(self, saved: Saved, weight: Tensor | None, bias: Tensor | None, wanted: Wanted) -> Gradients:
        if weight is None:
            return None, bias, None
        standard, scale, active = self._scales(saved)
        along = (weight * standard).sum(1)
        total = None
        if wanted[0]:
            across = weight - weight.mean(1, keepdim=True) - (active * along).unsqueeze(1) * standard
            total = self._unflatten(across * scale.unsqueeze(1))
        return total, bias, along if wanted[2] else None


def _divides(gain: Tensor | None) -> bool:
    """Whether outputs divided by their gains (p,) can be trusted; a GPU is not asked."""
    return gain is None or (is_sync_free(gain) and float(gain.detach().abs().min()) > LEAST_GAIN)


def _squares(standard: Tensor, scale_squared: Tensor, active: Tensor, wanted: Wanted, rows: Tensor) -> Tensor:
    """Squared norms (n,) from G, rows (n, p, K), with ŵ (p, 1, K), and (gain·s)² and a (p,) in float64."""
    along = inner_products(standard, rows.transpose(0, 1)).squeeze(1).double().square()  # (p, n): ⟨G, ŵ⟩²
    squares = along.new_zeros(rows.shape[0])
    if wanted[0]:
        whole = squared_row_norms(rows.flatten(0, 1)).view(rows.shape[:2]).t()
        across = whole - rows.sum(2).t().double().square() / rows.shape[2] - active.unsqueeze(1) * along
        across = across.clamp_min_(0) + rounding_slack(whole, rows.shape[2], rows.dtype)
        squares = scale_squared @ across
    return squares + along.sum(0) if wanted[2] else squares
