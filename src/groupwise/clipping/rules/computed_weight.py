"""Clips convolutions with standardised filters.

A filter w is used as W = l·n, with the gain l and the direction n of w - mean w. From an example's gradient G for W
follow those for w, which is c·(G - a·⟨G, n⟩·n) minus its mean, and for the gain, which is ⟨G, n⟩. Here c is
l/‖w - mean w‖, and a is 1, or 0 for a filter so flat that its norm is clamped to a constant. This map is the same for
all examples, so it can be applied to each gradient, or once to a sum.

With the gram formula, ⟨G, n⟩ = Σ_t g_t (x_t·n) comes from convolving the input with n, and the mean likewise.
"""

import math
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from groupwise.clipping.gram import inner_products, norms_from_products
from groupwise.clipping.precision import (
    at_least_zero,
    autocast,
    rounding_slack,
    second_product_slack,
    squared_row_norms,
    upcast,
)
from groupwise.clipping.rules.base import Gradients, Saved, Wanted, register_rule
from groupwise.clipping.rules.conv import ConvRule, positions_first

STANDARDIZATION_EPS = 1e-4


def standardize_weight(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Give each output filter mean 0 and squared norm 1; its sum of squared deviations is clamped to at least 1e-4.

    Args:
        weight: filters (p, ...); statistics are taken over all axes but the first.

    Returns:
        The standardised weight (same shape); the scale of each filter, (p, 1, ...); and whether its sum is not clamped.
    """
    inside = tuple(range(1, weight.dim()))
    centred = weight - weight.mean(inside, keepdim=True)
    squares = centred.square().sum(inside, keepdim=True)
    scale = squares.clamp_min(STANDARDIZATION_EPS).rsqrt()
    return centred * scale, scale, squares > STANDARDIZATION_EPS


class WSConv2d(nn.Conv2d):
    """`nn.Conv2d` whose filters are standardised to mean 0 and norm 1 before use (Qiao et al. 2019).

    De et al. (2022) train WRN16-4 with it; the paper follows them (section 5.1).

    Args:
        gain: learn a factor for each output channel, as De et al. do; all other arguments are those of `nn.Conv2d`.
    """

    gain: nn.Parameter | None

    def __init__(self, *args: Any, gain: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.padding_mode != "zeros":
            raise ValueError(f"WSConv2d pads with zeros only, and padding_mode={self.padding_mode!r} was given.")
        self.register_parameter("gain", nn.Parameter(torch.ones(self.out_channels)) if gain else None)

    def forward(self, x: Tensor) -> Tensor:
        """Convolve x (B, c, H, W) with the standardised filters: (B, p, H', W')."""
        weight = standardize_weight(self.weight)[0]
        if self.gain is not None:
            weight = weight * self.gain.view(-1, 1, 1, 1)
        return F.conv2d(x, weight, self.bias, self.stride, self.padding, self.dilation, self.groups)


@register_rule
class WSConv2dRule(ConvRule):
    """`groupwise.clipping.WSConv2d`: weight (p, c/groups, kh, kw), bias (p,), gain (p,).

    `saved` is (x, W, d, c, a) as in the module docstring: c and a are (p, 1). The directions d, (p, 2, K), are n and a
    constant one: subtracting the mean removes the component along it.
    """

    layer_type: ClassVar[type[nn.Module]] = WSConv2d
    autocast: ClassVar = "keep"  # filters are standardised in their own dtype; `prepare` and `forward` cast the rest
    parameter_names: ClassVar[tuple[str, ...]] = ("weight", "bias", "gain")

    def prepare(self, x: Tensor) -> Tensor:
        return super().prepare(autocast("lower", x, [])[0])

    def forward(self, x: Tensor, *parameters: Any) -> tuple[Tensor, Saved]:
        weight, bias, gain = parameters
        direction, scale, varies = standardize_weight(upcast(weight).flatten(1))
        length = torch.ones_like(scale) if gain is None else gain.view(-1, 1)
        used = (direction * length).view_as(weight).to(x.dtype)
        directions = torch.stack([direction, torch.full_like(direction, direction.shape[1] ** -0.5)], 1)
        y = self.convolve(x, used, None if bias is None else bias.to(x.dtype))
        return y, (x, used, directions, scale * length, varies.to(scale.dtype))

    # -- norms and sums -------------------------------------------------------------------------------------------

    def needs_filters(self, wanted: Wanted) -> bool:
        return wanted[0] or wanted[2]

    def _slack(self, saved: Saved, g: Tensor) -> Tensor:
        x, weight, _, scale, _ = saved
        taps = math.prod(self.module.kernel_size)
        slack = taps**0.5 * second_product_slack(x, g, max(g.shape[2:].numel(), weight[0].numel()))
        return slack * (scale.abs().amax() + 1.0).double()  # an upper bound on the map's norm

    def weighted_sum(self, saved: Saved, g: Tensor, factors: Tensor | None, wanted: Wanted) -> Gradients:
        weight, bias = super().weighted_sum(saved[:2], g, factors, self._of_used(wanted))
        total, gain = self._pulled(saved, None if weight is None else weight.unsqueeze(0), wanted)
        return None if total is None else total[0], bias, None if gain is None else gain[0]

    def per_example_gradients(self, saved: Saved, g: Tensor, wanted: Wanted) -> Gradients:
        weight, bias = super().per_example_gradients(saved[:2], g, self._of_used(wanted))
        rows, gain = self._pulled(saved, weight, wanted)
        return rows, bias, gain

    def _of_used(self, wanted: Wanted) -> Wanted:
        """Whether the gradients of W and of the bias are needed."""
        return self.needs_filters(wanted), wanted[1]

    def _pulled(self, saved: Saved, weight: Tensor | None, wanted: Wanted) -> tuple[Tensor | None, Tensor | None]:
        """Map gradients (n, p, …) of W to those of w and the gain; changes its input in place."""
        if weight is None:
            return None, None
        rows = weight.flatten(2)
        directions, scale, taken = (upcast(t).to(rows.dtype) for t in saved[2:])
        shares = torch.stack([taken, torch.ones_like(taken)], 2)
        by_filter = rows.transpose(0, 1)
        along = torch.bmm(by_filter, directions.mT)
        gains = along[:, :, 0].contiguous().t() if wanted[2] else None
        if not wanted[0]:
            return None, gains
        by_filter.baddbmm_(along * shares, directions, alpha=-1).mul_(scale.unsqueeze(2))
        return rows.view(weight.shape), gains

    def gram_norms(self, saved: Saved, g: Tensor, wanted: Wanted) -> Tensor:
        """Squared norms (n,) from inner products; each is changed by its rounding bound, towards the larger norm."""
        x, g = saved[0], upcast(g)
        directions, scale, taken = saved[2:]
        x = upcast(x)
        xx, rows = self.products(x, g.shape[2:]), positions_first(g)
        longest = max(*rows.shape[1:], directions.shape[2])
        lengths = xx.diagonal(dim1=1, dim2=2).clamp_min(0).sqrt().unsqueeze(1)
        slack = rounding_slack(torch.bmm(lengths, rows.abs()).squeeze(1), longest)
        along = (rows * self._seen(x, directions[:, 0])).sum(1).abs()
        squares = squared_row_norms(rows.sum(1)) if wanted[1] else xx.new_zeros(len(xx), dtype=torch.float64)
        if wanted[2]:
            squares = squares + squared_row_norms(along + slack)
        if wanted[0]:
            scaled = rows * scale.flatten()
            whole = norms_from_products(xx, inner_products(scaled, scaled), longest)
            removed = (along - slack).clamp_min(0).double().square() * taken.flatten()
            mean = (rows * self._seen(x, directions[:1, 1])).sum(1).abs()  # the constant direction is one for all
            removed += (mean - slack).clamp_min(0).double().square()
            squares = squares + at_least_zero(whole - removed @ scale.flatten().double().square())
        return squares

    def _seen(self, x: Tensor, filters: Tensor) -> Tensor:
        """The inputs of n examples convolved with filters (q, K): (n, T, q)."""
        return positions_first(self.convolve(x, filters.view(-1, *self._filter())))
