"""LayerNorm: one example's weight gradient is Σ_t g∘x̂ and its bias gradient Σ_t g."""

from typing import ClassVar

import torch
from torch import Tensor, nn

from groupwise.clipping.factors import weigh_rows
from groupwise.clipping.rules.base import Clip, Gradients, LayerRule, Saved, Wanted, register_rule, upcast


class PerExampleRule(LayerRule):
    """For layers with few parameters: their per-example gradients are small, so everything is made from them."""

    def weighted_sum(self, saved: Saved, g: Tensor, factors: Tensor | None, wanted: Wanted) -> Gradients:
        gradients = self.per_example_gradients(saved, g, wanted)
        if factors is None:
            return tuple(None if rows is None else rows.sum(0) for rows in gradients)
        return tuple(None if rows is None else weigh_rows(factors, rows) for rows in gradients)

    def clipped_sum(self, saved: Saved, g: Tensor, clip: Clip, wanted: Wanted) -> Gradients:
        gradients = self.per_example_gradients(saved, g, wanted)
        squares = [rows.flatten(1).square().sum(1) for rows in gradients if rows is not None]
        factors = clip(torch.stack(squares).sum(0))
        return tuple(None if rows is None else weigh_rows(factors, rows) for rows in gradients)


@register_rule
class LayerNormRule(PerExampleRule):
    """`nn.LayerNorm` over the trailing axes `normalized_shape`."""

    layer_type: ClassVar[type[nn.Module]] = nn.LayerNorm
    parameter_names: ClassVar[tuple[str, ...]] = ("weight", "bias")
    autocast: ClassVar = "float32"
    batched: ClassVar[tuple[int, ...]] = (0, 3, 4)
    module: nn.LayerNorm

    def forward(self, x: Tensor, *parameters: Tensor | None) -> tuple[Tensor, Saved]:
        weight, bias = parameters
        shape = list(self.module.normalized_shape)
        y, mean, rstd = torch.native_layer_norm(x, shape, weight, bias, self.module.eps)
        return y, (x, weight, bias, mean, rstd)

    def input_gradient(self, saved: Saved, g: Tensor) -> Tensor:
        x, weight, bias, mean, rstd = saved
        shape = list(self.module.normalized_shape)
        backward = torch.ops.aten.native_layer_norm_backward
        return backward(g.contiguous(), x, shape, mean, rstd, weight, bias, [True, False, False])[0]

    def per_example_gradients(self, saved: Saved, g: Tensor, wanted: Wanted) -> Gradients:
        x, _, _, mean, rstd = saved
        assert x is not None and mean is not None and rstd is not None
        g = upcast(g)
        between = tuple(range(1, g.dim() - len(self.module.normalized_shape)))
        weight = bias = None
        if wanted[0]:
            product = (upcast(x) - mean).mul_(rstd).mul_(g)
            weight = product.sum(between) if between else product
        if wanted[1]:
            bias = g.sum(between) if between else g
        return weight, bias
