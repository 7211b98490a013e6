"""Clips layers whose weight is computed from their parameters, in terms of the parameters.

An example's gradient G for the weight W that is used becomes that of the parameters by a linear map, which is the same
for all examples. So gradients that are formed go through it one by one, and a sum goes through it once.

- Filters that are standardised or have a length. A filter is used as W_o = l·n, with the direction n of w (weight
  norm), or of w - mean w. The gradient for w is c·(G - a·⟨G, n⟩·n), less its mean where w is centred, and that for the
  gain is b·⟨G, n⟩: c, a and b follow from how the length l depends on w.
- `spectral_norm`: W = V/σ, σ = uᵀV w. The gradient for V is (G - ⟨G, W⟩·u wᵀ)/σ.

Where norms go by inner products, ⟨G, n⟩ = Σ_t g_t (x_t·n) is found from what n alone makes of the input, and so are the
others.
"""

from abc import abstractmethod
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from groupwise.clipping.gram import norms_from_products, self_products
from groupwise.clipping.norm_terms import Terms
from groupwise.clipping.precision import (
    LONGEST_SUM,
    at_least_zero,
    autocast,
    raised,
    rounding_slack,
    second_product_slack,
    squared_row_norms,
    upcast,
)
from groupwise.clipping.rules.base import (
    Gradients,
    LayerRule,
    RuleContext,
    Saved,
    Wanted,
    chunk_floats,
    register_rule,
)
from groupwise.clipping.rules.conv import Conv1dRule, Conv2dRule, Conv3dRule, ConvRule, positions_first
from groupwise.clipping.rules.linear import LinearRule
from groupwise.clipping.rules.ws_conv import STANDARDIZATION_EPS, WSConv2d

_LIST = "parametrizations.weight"


class ComputedWeightRule(LayerRule):
    """Before the rule of a linear layer or convolution, which computes with the weight that is used.

    `saved` is (x, weight used, …): what follows is what the map is made of. The bias is the second parameter.
    """

    autocast: ClassVar = "keep"  # weights are computed as they are stored; `prepare` and `forward` lower the rest
    stacks: ClassVar[bool] = False
    module: Any

    def prepare(self, x: Tensor) -> Tensor:
        return super().prepare(autocast("lower", x, [])[0])

    def forward(self, x: Tensor, *parameters: Tensor | None) -> tuple[Tensor, Saved]:
        weight, bias, *gain = parameters
        assert weight is not None
        used, *rest = self.compute(upcast(weight.detach()), *gain)
        used = used.view_as(weight).to(x.dtype)
        y, _ = super().forward(x, used, None if bias is None else bias.to(x.dtype))  # type: ignore[safe-super]
        return y, (x, used, *rest)

    def input_gradient(self, saved: Saved, g: Tensor) -> Any:
        return super().input_gradient(saved[:2], g)  # type: ignore[safe-super]

    def outer_products(self, saved: Saved, g: Tensor) -> None:
        """They are of the weight used."""

    def materializes(self, saved: Saved, g: Tensor, wanted: Wanted, context: RuleContext) -> bool:
        return super().materializes(saved, g, _of_used(wanted), context)

    def squared_norms(self, saved: Saved, g: Tensor, wanted: Wanted, context: RuleContext) -> Terms | Tensor:
        used = _of_used(wanted)
        if not used[0]:
            return super().squared_norms(saved, g, used, context)
        if self.materializes(saved, g, wanted, context):
            found = LayerRule.squared_norms(self, saved, g, wanted, context)
            assert isinstance(found, Tensor)
            squares = found
        else:
            step = max(1, chunk_floats(g) // (4 * _positions(self, g) ** 2))
            parts = (self.examples(saved, g, slice(i, i + step)) for i in range(0, len(g), step))
            squares = torch.cat([self._squares_of_sides(*part, wanted) for part in parts])
            if _positions(self, g) <= LONGEST_SUM:  # up to there its own slack is enough for the sum's too
                return squares
        x, weight = saved[:2]
        assert x is not None and weight is not None
        taps = torch.Size(getattr(self.module, "kernel_size", ())).numel()
        slack = taps**0.5 * second_product_slack(x, g, max(_positions(self, g), weight[0].numel()))
        return raised(squares, slack * self.stretch(saved))

    def weighted_sum(
        self, saved: Saved, g: Tensor, factors: Tensor | None, wanted: Wanted, context: RuleContext
    ) -> Gradients:
        weight, bias = super().weighted_sum(saved[:2], g, factors, _of_used(wanted), context)
        pulled = self._pulled(saved, None if weight is None else weight.unsqueeze(0), wanted)
        first, *gain = (None if part is None else part[0] for part in pulled)
        return first, bias, *gain

    def per_example_gradients(self, saved: Saved, g: Tensor, wanted: Wanted) -> Gradients:
        weight, bias = super().per_example_gradients(saved[:2], g, _of_used(wanted))  # type: ignore[safe-super]
        first, *gain = self._pulled(saved, weight, wanted)
        return first, bias, *gain

    @abstractmethod
    def compute(self, weight: Tensor, *gain: Tensor | None) -> tuple[Tensor, ...]:
        """The weight that is used, and what the map is made of."""

    @abstractmethod
    def pull(self, saved: Saved, rows: Tensor, wanted: Wanted) -> tuple[Tensor | None, ...]:
        """From gradients (n, p, K) of the weight used, which may be changed, to the parameters', but the bias's."""

    @abstractmethod
    def stretch(self, saved: Saved) -> Tensor:
        """A bound of the map's norm, float64."""

    @abstractmethod
    def squares_of_sides(self, saved: Saved, g: Tensor, xx: Tensor, wanted: Wanted) -> Tensor:
        """Squared norms (n,) without the bias, float64, raised by their rounding.

        Args:
            saved: with the inputs of n examples.
            g: output gradients (n, T, p).
            xx: inner products of the inputs (n, T, T).
            wanted: which parameters count.
        """

    def _pulled(self, saved: Saved, weight: Tensor | None, wanted: Wanted) -> Gradients:
        own = [value for i, value in enumerate(self.values()) if i != 1]
        if weight is None:
            return (None,) * len(own)
        parts = self.pull(saved, weight.flatten(2), wanted)
        return tuple(
            None if part is None or value is None else part.reshape(-1, *value.shape)
            for part, value in zip(parts, own, strict=True)
        )

    def _squares_of_sides(self, saved: Saved, g: Tensor, wanted: Wanted) -> Tensor:
        x = saved[0]
        assert x is not None
        if isinstance(self, ConvRule):
            xx, rows = self.geometry.products(upcast(x), g.shape[2:]), positions_first(upcast(g))
        else:
            rows = upcast(g).reshape(len(g), -1, g.shape[-1])
            xx = self_products(upcast(x).reshape(len(x), rows.shape[1], -1))
        squares = self.squares_of_sides(saved, rows, xx, wanted)
        return squares + squared_row_norms(rows.sum(1)) if wanted[1] else squares

    def seen(self, saved: Saved, filters: Tensor) -> Tensor:
        """What filters (q, K) in the place of the weight's make of the inputs, (n, T, q)."""
        x, weight = saved[:2]
        assert x is not None and weight is not None
        x, filters = upcast(x), filters.view(-1, *weight.shape[1:])
        if isinstance(self, ConvRule):
            return positions_first(self.convolve(x, filters))
        return F.linear(x, filters).reshape(len(x), -1, len(filters))


class FilterRule(ComputedWeightRule):
    """Filters w (p, …), used by their direction and a length; bias (p,); gain, a number for each filter.

    `saved` is (x, weight used, n (p, K), c, a, b), (p, 1) each.
    """

    centred: ClassVar[bool] = True

    def pull(self, saved: Saved, rows: Tensor, wanted: Wanted) -> tuple[Tensor | None, ...]:
        direction, scale, taken, length = _tensors(saved[2:], rows.dtype)
        along = torch.bmm(rows.transpose(0, 1), direction.unsqueeze(2)).transpose(0, 1)
        gain = along * length if wanted[2] else None
        if not wanted[0]:
            return None, gain
        if self.centred:
            rows -= rows.mean(2, keepdim=True)
        return rows.addcmul_(along * taken, direction, value=-1).mul_(scale), gain

    def stretch(self, saved: Saved) -> Tensor:
        _, scale, _, length = _tensors(saved[2:], torch.float64)
        return scale.abs().amax() + length.abs().amax()

    def squares_of_sides(self, saved: Saved, g: Tensor, xx: Tensor, wanted: Wanted) -> Tensor:
        direction, scale, taken, length = _tensors(saved[2:], g.dtype)
        k = direction.shape[1]
        longest = max(g.shape[1], k, g.shape[2])
        lengths = xx.diagonal(dim1=1, dim2=2).clamp_min(0).sqrt().unsqueeze(1)
        slack = rounding_slack(torch.bmm(lengths, g.abs()).squeeze(1), longest)
        along = (g * self.seen(saved, direction)).sum(1).abs()
        squares = squared_row_norms((along + slack) * length.flatten()) if wanted[2] else xx.new_zeros(len(g))
        if wanted[0]:
            whole = norms_from_products(xx, self_products(g * scale.flatten()), False, longest)
            share = taken.double() * (2 - taken.double())
            removed = (along - slack).clamp_min(0).double().square() * share.flatten()
            if self.centred:
                level = self.seen(saved, direction.new_full((1, k), k**-0.5))
                removed += ((g * level).sum(1).abs() - slack).clamp_min(0).double().square()
            squares = squares + at_least_zero(whole - removed @ scale.flatten().double().square())
        return squares


STANDARDIZED = {
    *(f"timm.layers.std_conv.{scaled}StdConv2d{same}" for scaled in ("", "Scaled") for same in ("", "Same")),
    "transformers.models.bit.modeling_bit.WeightStandardizedConv2d",
}
"""Classes with this formula; transformers' ViT hybrid has the last one, too."""


@register_rule
class WSConv2dRule(FilterRule, Conv2dRule):
    """`groupwise.clipping.WSConv2d`: weight (p, c/groups, kh, kw), bias (p,), gain (p,)."""

    layer_type: ClassVar[type[nn.Module]] = WSConv2d
    parameter_names: ClassVar[tuple[str, ...]] = ("weight", "bias", "gain")

    def compute(self, weight: Tensor, *gain: Tensor | None) -> tuple[Tensor, ...]:
        centred, squares = _centred(weight)
        scale = squares.clamp_min(STANDARDIZATION_EPS).rsqrt()
        gains = squares.new_ones(1) if gain[0] is None else gain[0].view(-1, 1)
        direction, free = centred * scale, (squares > STANDARDIZATION_EPS).to(scale.dtype)
        return direction * gains, direction, scale * gains, free, torch.ones_like(scale)


@register_rule
class StdConv2dRule(FilterRule, Conv2dRule):
    """`StdConv2d` and `ScaledStdConv2d` of timm (BiT, NF-ResNets), and transformers' `WeightStandardizedConv2d`.

    Weight (p, c/groups, kh, kw), bias (p,), gain (p, 1, 1, 1). They are recognised by their names, so that neither need
    be installed. Padding to the same size happens outside.
    """

    parameter_names: ClassVar[tuple[str, ...]] = ("weight", "bias", "gain")

    @classmethod
    def handles(cls, module: nn.Module) -> bool:
        own = next((kind for kind in type(module).__mro__ if "forward" in kind.__dict__), None)
        return own is not None and f"{own.__module__}.{own.__name__}" in STANDARDIZED

    def prepare(self, x: Tensor) -> Tensor:
        m = self.module
        if getattr(m, "pad", None) is not None:
            x = m.pad(x)
        elif getattr(m, "same_pad", False):
            shape = zip(x.shape[2:], m.kernel_size, m.stride, m.dilation, strict=True)
            more = [max((-(-n // step) - 1) * step + (k - 1) * gap + 1 - n, 0) for n, k, step, gap in shape]
            x = F.pad(x, [part for each in reversed(more) for part in (each // 2, each - each // 2)])
        return super().prepare(x)

    def compute(self, weight: Tensor, *gain: Tensor | None) -> tuple[Tensor, ...]:
        centred, squares = _centred(weight)
        k, factor = centred.shape[1], getattr(self.module, "scale", 1.0)
        scale, norm = (squares / k + self.module.eps).rsqrt(), squares.sqrt()
        gains = factor * (squares.new_ones(1) if gain[0] is None else gain[0].view(-1, 1))
        direction = centred / norm.clamp_min(torch.finfo(norm.dtype).tiny)
        return centred * (scale * gains), direction, scale * gains, squares * scale.square() / k, factor * scale * norm


class WeightNormRule(FilterRule):
    """`torch.nn.utils.parametrizations.weight_norm`: v (p, …), bias (p,), l (p, 1, …)."""

    centred: ClassVar[bool] = False
    computation: ClassVar[type[nn.Module]] = parametrizations._WeightNorm  # type: ignore[attr-defined]
    parameter_names: ClassVar[tuple[str, ...]] = (f"{_LIST}.original1", "bias", f"{_LIST}.original0")

    def compute(self, weight: Tensor, *gain: Tensor | None) -> tuple[Tensor, ...]:
        assert gain[0] is not None
        v, lengths = weight.flatten(1), gain[0].view(-1, 1)
        norms = torch.linalg.vector_norm(v, dim=1, keepdim=True)
        ones = torch.ones_like(norms)
        return v * (lengths / norms), v / norms, lengths / norms, ones, ones


class SpectralNormRule(ComputedWeightRule):
    """`torch.nn.utils.parametrizations.spectral_norm`: V (p, …), bias (p,).

    `saved` is (x, weight used, W, u (p,), w (K,), σ). As torch has it, u and w are constants, which a forward pass in
    training mode moves.
    """

    computation: ClassVar[type[nn.Module]] = parametrizations._SpectralNorm  # type: ignore[attr-defined]
    parameter_names: ClassVar[tuple[str, ...]] = (f"{_LIST}.original", "bias")

    def compute(self, weight: Tensor, *gain: Tensor | None) -> tuple[Tensor, ...]:
        norm = _computation(self.module)
        used = norm(weight)
        u, w = norm._u.clone(), norm._v.clone()
        return used, used.flatten(1), u, w, torch.dot(u, weight.flatten(1) @ w)

    def pull(self, saved: Saved, rows: Tensor, wanted: Wanted) -> tuple[Tensor | None, ...]:
        used, u, w, sigma = _tensors(saved[2:], rows.dtype)
        along = (rows.flatten(1) @ used.flatten()).view(-1, 1, 1)
        return (rows.addcmul_(along, torch.outer(u, w), value=-1).div_(sigma),)

    def stretch(self, saved: Saved) -> Tensor:
        used, u, w, sigma = _tensors(saved[2:], torch.float64)
        return ((1 + used.norm() * u.norm() * w.norm()) / sigma).abs()

    def squares_of_sides(self, saved: Saved, g: Tensor, xx: Tensor, wanted: Wanted) -> Tensor:
        used, u, w, sigma = _tensors(saved[2:], g.dtype)
        longest = max(g.shape[1], used.shape[1], g.shape[2])
        whole = norms_from_products(xx, self_products(g), False, longest)
        lengths = xx.diagonal(dim1=1, dim2=2).clamp_min(0).sqrt()
        size = (lengths * torch.linalg.vector_norm(g, dim=2)).sum(1)
        slack = rounding_slack(size, longest * g.shape[1], g.dtype).double()
        along = (g * self.seen(saved, used)).sum((1, 2)).double()
        across = ((g @ u).unsqueeze(2) * self.seen(saved, w)).sum((1, 2)).double()
        most = used.norm().double()
        lost = 2 * slack * (along.abs() + most * (across.abs() + slack)) + 2 * slack * most * along.abs()
        length = u.double().square().sum() * w.double().square().sum()
        return at_least_zero(whole - 2 * along * across + length * along.square() + lost) / sigma.double().square()


class _Parametrized(LayerRule):
    """The parameters of a weight with one parametrization, over the first axis."""

    claims: ClassVar[str] = _LIST
    computation: ClassVar[type[nn.Module]]

    @classmethod
    def handles(cls, module: nn.Module) -> bool:
        found = _computation(module)
        return super().handles(module) and type(found) is cls.computation and bool(found.dim == 0)

    def values(self) -> list[Tensor | None]:
        inside, bias = self.module.get_submodule(_LIST)._parameters, self.module._parameters["bias"]
        return [bias if name == "bias" else inside[name.rpartition(".")[2]] for name in self.parameter_names]


for _kind in (WeightNormRule, SpectralNormRule):
    for _layer in (LinearRule, Conv1dRule, Conv2dRule, Conv3dRule):
        register_rule(type(f"{_kind.__name__}Of{_layer.__name__}", (_Parametrized, _kind, _layer), {}))


def _computation(module: nn.Module) -> Any:
    """The one parametrization of a module's weight, if nothing else of it is computed."""
    lists = getattr(module, "parametrizations", None)
    if not isinstance(lists, nn.ModuleDict) or list(lists) != ["weight"]:
        return None
    (found, *more) = lists["weight"].children()
    return None if more else found


def _centred(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Filters (p, K) less their means, and the sums of their squares (p, 1)."""
    rows = weight.flatten(1)
    rows = rows - rows.mean(1, keepdim=True)
    return rows, rows.square().sum(1, keepdim=True)


def _of_used(wanted: Wanted) -> Wanted:
    """Whether the gradients of the weight used, and of the bias, are needed."""
    return wanted[0] or any(wanted[2:]), wanted[1]


def _positions(rule: LayerRule, g: Tensor) -> int:
    return (g.shape[2:] if isinstance(rule, ConvRule) else g.shape[1:-1]).numel()


def _tensors(saved: Saved, dtype: torch.dtype) -> list[Tensor]:
    return [t.to(dtype) for t in saved if t is not None]
