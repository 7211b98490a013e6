"""Clips `nn.LayerNorm` and `nn.RMSNorm`, which normalise over the last axes.

One example's weight gradient is Σ g∘x̂ and its bias gradient Σ g, over all positions of a number of the last axes.
RMSNorm has x̂ = x/√(mean x² + eps). The RMSNorm classes of transformers have no rule: copies of their weights, one for
each example (`per_example.py`), take as long.
"""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from groupwise.clipping.precision import upcast
from groupwise.clipping.rules.base import Gradients, LayerRule, Saved, Wanted, register_rule
from groupwise.errors import UserError


@register_rule
class LayerNormRule(LayerRule):
    """`nn.LayerNorm` over the trailing axes `normalized_shape`."""

    layer_type: ClassVar[type[nn.Module]] = nn.LayerNorm
    parameter_names: ClassVar[tuple[str, ...]] = ("weight", "bias")
    autocast: ClassVar = "float32"
    features_last: ClassVar[bool] = True
    batched: ClassVar[tuple[int, ...]] = (0, 3, 4)
    module: nn.LayerNorm

    def forward(self, x: Tensor, *parameters: Any) -> tuple[Tensor, Saved]:
        weight, bias = parameters
        shape = list(self.module.normalized_shape)
        y, mean, rstd = torch.native_layer_norm(x, shape, weight, bias, self.module.eps)
        return y, (x, weight, bias, mean, rstd)

    def input_gradient(self, saved: Saved, g: Tensor) -> Tensor:
        x, weight, bias, mean, rstd = saved
        shape = list(self.module.normalized_shape)
        backward = torch.ops.aten.native_layer_norm_backward
        return backward(g, x, shape, mean, rstd, weight, bias, [True, False, False])[0]

    def per_example_gradients(self, saved: Saved, g: Tensor, wanted: Wanted) -> Gradients:
        x, _, _, mean, rstd = saved
        g = upcast(g)
        shape = g.shape[g.dim() - len(self.module.normalized_shape) :]
        between = tuple(range(1, g.dim() - len(shape)))
        weight = bias = None
        if wanted[0]:
            product = (upcast(x) - mean).mul_(g)
            if between:
                rows = product.flatten(1, len(between)).flatten(2)
                scales = rstd.to(rows.dtype).reshape(len(x), 1, rows.shape[1])
                weight = torch.bmm(scales, rows).view(len(x), *shape)
            else:
                weight = product.mul_(rstd)
        if wanted[1]:
            bias = g.sum(between) if between else g
        return weight, bias


@register_rule
class RMSNormRule(LayerRule):
    """`nn.RMSNorm` over the trailing axes `normalized_shape`: weight (*shape)."""

    layer_type: ClassVar[type[nn.Module]] = nn.RMSNorm
    parameter_names: ClassVar[tuple[str, ...]] = ("weight",)
    autocast: ClassVar = "float32"
    batched: ClassVar[tuple[int, ...]] = (0, 2)
    features_last: ClassVar[bool] = True
    module: nn.RMSNorm

    def forward(self, x: Tensor, *parameters: Any) -> tuple[Tensor, Saved]:
        (weight,) = parameters
        if x.dim() <= weight.dim() or x.shape[-weight.dim() :] != weight.shape:
            raise UserError(
                f"{type(self.module).__name__} got an input of shape {tuple(x.shape)}: the batch must come first, and "
                f"{tuple(weight.shape)} last."
            )
        wide, used, eps = upcast(x), upcast(weight), self.module.eps
        mean = wide.square().mean(tuple(range(-used.dim(), 0)), keepdim=True)
        rstd = mean.add_(torch.finfo(wide.dtype).eps if eps is None else eps).rsqrt_()
        y = (wide * rstd).mul_(used) if used.dtype == wide.dtype else wide * rstd * used
        return y.to(x.dtype), (x, used, rstd)

    def input_gradient(self, saved: Saved, g: Tensor) -> Tensor:
        """(g∘w)/rms - x·⟨g∘w, x⟩/(n·rms³)."""
        x, used, rstd = saved
        wide, g = upcast(x), upcast(g)
        along = (wide * g).flatten(-used.dim()) @ used.flatten()
        along = along.view(rstd.shape) * rstd.pow(3).div_(-used.numel())
        return (g * used).mul_(rstd).addcmul_(wide, along).to(x.dtype)

    def per_example_gradients(self, saved: Saved, g: Tensor, wanted: Wanted) -> Gradients:
        x, used, rstd = saved
        rows = (upcast(x) * upcast(g)).reshape(len(x), -1, used.numel())  # (B, T, n)
        return (torch.bmm(rstd.reshape(len(x), 1, -1).to(rows.dtype), rows).view(len(x), *used.shape),)
