"""Standardises the weights of a convolution, and clips it: norms go through the standardisation in closed form.

For a filter w with K weights let ŵ = s·(w - mean w), s = max(Σ(w - mean w)², eps)^(-½), and let G be one example's
gradient for the filter used, gain·ŵ. Then the gradient for w is gain·s·(G - mean G - a·⟨G, ŵ⟩·ŵ) and that for the gain
is ⟨G, ŵ⟩, where a is 1, or 0 where eps holds s fixed. As ŵ has mean 0 (and norm 1 where a = 1), the squared norm is
(gain·s)²·(‖G‖² - (ΣG)²/K - a·⟨G, ŵ⟩²): three numbers a filter, and the map is linear, so sums go through it once.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from groupwise.clipping.cost_model import Work, inner_products, norms_from_products, self_products
from groupwise.clipping.precision import at_least_zero, autocast, rounding_slack, slack_of, squared_row_norms, upcast
from groupwise.clipping.rules.base import Gradients, RuleContext, Saved, Wanted, in_format_of, register_rule
from groupwise.clipping.rules.conv import ConvRule, positions_first

STANDARDIZATION_EPS = 1e-4
CACHED = ("cpu",)
"""Devices with a chunk of gradients in a cache: there, reading it again for ΣG beats a product with two rows."""


def standardize_weight(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Give each output filter mean 0 and squared norm 1; a summed squared deviation counts as 1e-4 at least.

    Args:
        weight: filters (p, ...); statistics are taken over all axes but the first.

    Returns:
        The standardised weight (same shape) and the scale of each filter, (p, 1, ...).
    """
    centred = weight - weight.mean(dim=tuple(range(1, weight.dim())), keepdim=True)
    scale = centred.square().sum(dim=tuple(range(1, weight.dim())), keepdim=True).clamp_min(STANDARDIZATION_EPS).rsqrt()
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

    `saved` is (x, weight used, directions, gain·s, (a, 1), what ŵ alone gives for x), the last for ⟨G, ŵ⟩ without G;
    directions (p, 2, K) are ŵ and that of the mean, of length 1, by which (a, 1) says whether they are taken out of G;
    in the memory of a CPU ŵ alone waits for the backward pass.
    """

    layer_type: ClassVar[type[nn.Module]] = WSConv2d
    parameter_names: ClassVar[tuple[str, ...]] = ("weight", "bias", "gain")
    autocast: ClassVar = "keep"  # filters are standardised as they are stored; `prepare` and `forward` lower the rest
    batched: ClassVar[tuple[int, ...]] = (0, 5)

    def prepare(self, x: Tensor) -> Tensor:
        return super().prepare(autocast("lower", x, [])[0])

    def forward(self, x: Tensor, *parameters: Tensor | None) -> tuple[Tensor, Saved]:
        weight, bias, gain = parameters
        assert weight is not None
        standard, scale = standardize_weight(upcast(weight))
        used = (standard if gain is None else standard * gain.view(-1, 1, 1, 1)).to(x.dtype)
        if x.dtype == standard.dtype and _in_full(x) and self._may_use_products(x):
            y = output = self._convolve(x, standard, None)
            if gain is not None:
                y = y * gain.view(-1, 1, 1)
            if bias is not None:
                y = y + bias.view(-1, 1, 1)
        else:
            y, output = self._convolve(x, used, None if bias is None else bias.to(x.dtype)), None
        scale = scale.flatten()
        taken = scale.new_ones(len(scale), 2)
        taken[:, 0] = scale < STANDARDIZATION_EPS**-0.5
        directions = standard if x.device.type in CACHED else self._directions(standard)
        return y, (x, used, directions, scale if gain is None else scale * gain, taken, output)

    def keep(self, saved: Saved, context: RuleContext) -> Saved:
        """The output of ŵ only where norms go by inner products."""
        y = saved[5]
        needed = y is not None and not context.save_memory and self.choose(saved, y, context) == "gram"
        return saved if needed else (*saved[:5], None)

    def choose(self, saved: Saved, g: Tensor, context: RuleContext) -> str:
        x = saved[0]
        assert x is not None
        ways = partial(self._ways, x.shape, g.shape, context.own_group, saved[5] is None)
        return context.choices.choose((tuple(x.shape), tuple(g.shape), context.own_group), x.device, ways)

    def uses_weight(self, wanted: Wanted) -> bool:
        """Whether weight or gain count: both come from the gradient of the weight used."""
        return wanted[0] or wanted[2]

    def _may_use_products(self, x: Tensor) -> bool:
        """Whether T×T products could be smaller than gradients, so that ŵ's output is worth a pass over it."""
        return math.prod(self._geometry.out(x.shape[2:])) ** 2 <= self.module.out_channels * self._filter_size()

    def _ways(self, inputs: torch.Size, out: torch.Size, own_group: bool, again: bool) -> dict[str, Work]:
        """`ways`, where inner products need ŵ's output `again`: it was not kept."""
        ways = self.ways(inputs, out, own_group)
        if again and "gram" in ways:
            product = 2.0 * math.prod(out) * self._filter_size()
            ways["gram"] = replace(ways["gram"], matmul=ways["gram"].matmul + product)
        return ways

    def _directions(self, standard: Tensor) -> Tensor:
        """(p, 2, K) of ŵ (p, c/groups, kh, kw)."""
        k = self._filter_size()
        directions = standard.new_empty(len(standard), 2, k)
        self._unflatten(directions[:, 0]).copy_(standard)
        directions[:, 1] = k**-0.5
        return directions

    def _scales(self, saved: Saved) -> tuple[Tensor, Tensor, Tensor]:
        """Directions (p, 2, K), gain·s (p,), and (a, 1), (p, 2): a is 1 where the scale depends on the weight."""
        directions, scale, taken = saved[2:5]
        assert directions is not None and scale is not None and taken is not None
        return self._directions(directions) if directions.dim() == 4 else directions, scale, taken

    def _squares_from_products(self, saved: Saved, g: Tensor, wanted: Wanted, context: RuleContext) -> Tensor:
        """The same three numbers a filter without G: ⟨G, ŵ⟩ from what ŵ gives, ΣG from sums over windows of the input.

        Each is moved by its own rounding towards the larger norm.
        """
        x, scale, taken, y = saved[0], *saved[3:]
        assert x is not None and scale is not None and taken is not None
        if y is None:
            directions = self._scales(saved)[0]
            y = self._convolve(upcast(x), in_format_of(x, self._unflatten(directions[:, 0])), None)
        rows, k = positions_first(upcast(g)), self._filter_size()
        longest = max(rows.shape[1], k, rows.shape[2])
        between = self._products(saved, g, context)
        lengths = between.diagonal(dim1=1, dim2=2).clamp_min(0).sqrt().unsqueeze(1)
        ones = x.new_ones(1, 1, *self.module.kernel_size, dtype=rows.dtype)
        shape = self._geometry
        windows = F.conv2d(upcast(x).sum(1, keepdim=True), ones, None, shape.stride, shape.padding, shape.dilation)
        total = inner_products(windows.flatten(2), rows.mT).squeeze(1)  # (B, p): ΣG
        along, size = (rows * positions_first(y)).sum(1), torch.bmm(lengths, rows.abs()).squeeze(1)
        slack = rounding_slack(size, longest)
        squares = rows.new_zeros(len(rows))
        if wanted[0]:
            weighed = rows * scale
            whole = norms_from_products(between, self_products(weighed), False, longest)
            removed = (total.abs() / k**0.5 - slack).clamp_min(0).double().square()
            removed = removed + taken[:, 0] * (along.abs() - slack).clamp_min(0).double().square()
            squares = at_least_zero(torch.addmv(whole, removed, scale.double().square(), alpha=-1))
        return squares + squared_row_norms(along.abs() + slack) if wanted[2] else squares

    def slack(self, saved: Saved, g: Tensor) -> Tensor:
        scale = saved[3]  # the map from G to the gradients of weight and gain lengthens by no more
        assert scale is not None
        return super().slack(saved, g) * (scale.abs().amax().double() + 1)

    def measure(self, saved: Saved, wanted: Wanted) -> Callable[[Tensor], Tensor]:
        """From gradients (n, p, K) of the weight used to squared norms (n,) of weight and gain."""
        directions, scale, taken = self._scales(saved)
        squared = scale.double().square() * float(wanted[0])
        # ‖G‖² is raised by its rounding, which covers what is taken out, filter by filter.
        whole = squared * (1 + slack_of(directions.shape[2], directions.dtype, directions.device))
        along = taken * squared.unsqueeze(1)
        if wanted[2]:
            along[:, 0].sub_(1)
        return partial(_squares, directions, whole, along.flatten())

    def finish(self, saved: Saved, weight: Tensor | None, bias: Tensor | None, wanted: Wanted) -> Gradients:
        if weight is None:
            return None, bias, None
        directions, scale, taken = self._scales(saved)
        along = torch.bmm(weight.unsqueeze(1), directions.mT)
        total = None
        if wanted[0]:
            across = torch.baddbmm(weight.unsqueeze(1), along * taken.unsqueeze(1), directions, alpha=-1)
            total = torch.empty_like(self.module.weight, dtype=weight.dtype)
            torch.mul(self._unflatten(across), scale.view(-1, 1, 1, 1), out=total)
        return total, bias, along[:, 0, 0] if wanted[2] else None


def _in_full(x: Tensor) -> bool:
    """Whether convolutions of such inputs keep all their bits here and now."""
    backend: Any = torch.backends.mkldnn if x.device.type == "cpu" else torch.backends.cudnn
    return x.dtype == torch.float64 or backend.conv.fp32_precision in ("none", "ieee")


def _squares(directions: Tensor, of_whole: Tensor, of_along: Tensor, rows: Tensor) -> Tensor:
    """Squared norms (n,) from G, rows (n, p, K), which are read twice: for ‖G‖², and for both inner products.

    What ‖G‖² (p,) and the squared inner products (2p,), which are taken out, count in the norm is given in float64.
    """
    if rows.device.type in CACHED:
        along = inner_products(directions[:, :1], rows.transpose(0, 1))
        along = torch.cat([along, rows.sum(2).t().unsqueeze(1) * rows.shape[2] ** -0.5], 1)
    else:
        along = inner_products(directions, rows.transpose(0, 1))
    whole = squared_row_norms(rows.flatten(0, 1)).view(rows.shape[:2])
    removed = along.double().square_().flatten(0, 1).t()
    return at_least_zero(torch.addmv(whole @ of_whole, removed, of_along, alpha=-1))
