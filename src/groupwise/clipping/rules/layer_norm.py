"""LayerNorm: one example's weight gradient is Σ_t g∘x̂ and its bias gradient Σ_t g."""

from typing import ClassVar

import torch
from torch import Tensor, nn

from groupwise.clipping.rules.base import Gradients, Saved, Wanted, register_rule, upcast
from groupwise.clipping.rules.per_example import PerExampleRule


@register_rule
class LayerNormRule(PerExampleRule):
    """`nn.LayerNorm` over the trailing axes `normalized_shape`."""

    layer_type: ClassVar[type[nn.Module]] = nn.LayerNorm
    parameter_names: ClassVar[tuple[str, ...]] = ("weight", "bias")
    autocast: ClassVar = "float32"
    features_last: ClassVar[bool] = True
    batched: ClassVar[tuple[int, ...]] = (0, 3, 4)
    module: nn.LayerNorm

    def forward(self, x: Tensor, *parameters: Tensor | None) -> tuple[Tensor, Saved]:
        weight, bias = parameters
        shape = list(self.module.normalized_shape)
        y, mean, rstd = torch.native_layer_norm(x, shape, weight, bias, self.module.eps)
        return y, (x, weight, bias, mean, rstd)

    def arrange(self, saved: Saved, g: Tensor) -> Tensor:
        return g.contiguous()

    def input_gradient(self, saved: Saved, g: Tensor) -> Tensor:
        x, weight, bias, mean, rstd = saved
        shape = list(self.module.normalized_shape)
        backward = torch.ops.aten.native_layer_norm_backward
        return backward(g, x, shape, mean, rstd, weight, bias, [True, False, False])[0]

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
