"""Clips `nn.LayerNorm` and `nn.RMSNorm`, which normalise over the last axes, and `nn.GroupNorm`.

One example's weight gradient is Σ g∘x̂ and its bias gradient is Σ g, summed over all positions that share an entry of
the weight. RMSNorm has x̂ = x/√(mean x² + eps). The RMSNorm classes of transformers have no rule: copies of their
weights, one per example (`per_example.py`), are as fast.
"""

import math
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
                f"{type(self.module).__name__} got an input of shape {tuple(x.shape)}: its first axis must be the "
                f"batch, and its last axes {tuple(weight.shape)}."
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


LARGEST_GRID = 65_535
"""The most groups, over all examples, for CUDA's backward kernel: each is a block on the grid's second axis."""


@register_rule
class GroupNormRule(LayerRule):
    """`nn.GroupNorm` on (B, C, ...): weight (C,), bias (C,).

    torch's backward kernel also computes both sums, added up over its batch. So it gets the whole batch as one example
    with B·C channels. This needs contiguous tensors. For channels_last on a CPU, and for more than `LARGEST_GRID`
    groups, the gradients are computed from sums of g and g∘x instead.
    """

    layer_type: ClassVar[type[nn.Module]] = nn.GroupNorm
    parameter_names: ClassVar[tuple[str, ...]] = ("weight", "bias")
    autocast: ClassVar = "float32"
    batched: ClassVar[tuple[int, ...]] = (0, 2, 3, 4, 5)
    module: nn.GroupNorm

    def has_batch(self, axes: int) -> bool:
        return True

    def forward(self, x: Tensor, *parameters: Any) -> tuple[Tensor, Saved]:
        weight, bias = parameters
        x = x if _stays_channels_last(x) else x.contiguous()
        y, mean, rstd = torch.native_group_norm(x, weight, bias, *self._sizes(x), self.module.eps)
        return y, (x, weight, mean, rstd, None, None)

    def input_gradient(self, saved: Saved, g: Tensor) -> Tensor | None:
        return self.begin_backward(saved, g, True)[0]

    def begin_backward(self, saved: Saved, g: Tensor, needs_input: bool) -> tuple[Tensor | None, Saved]:
        """The input gradient; the new `saved` holds the per-example gradients (B, C) of weight and bias."""
        x, weight, mean, rstd = saved[:4]
        kernel, (b, c, space, groups) = torch.ops.aten.native_group_norm_backward, self._sizes(x)
        if _stays_channels_last(x) or b * groups > LARGEST_GRID:
            masks = [needs_input, False, False]
            gx = kernel(g, x, mean, rstd, weight, b, c, space, groups, masks)[0] if needs_input else None
            wide, g = upcast(x).reshape(b, c, space), upcast(g).reshape(b, c, space)
            biases = g.sum(2)
            centred = (g * wide).sum(2).view(b, groups, -1) - biases.view(b, groups, -1) * mean.unsqueeze(2)
            return gx, (None, None, None, None, (centred * rstd.unsqueeze(2)).view(b, c), biases)
        scales = (x.new_ones(c) if weight is None else weight).expand(b, c)
        given = (upcast(g), upcast(x), upcast(mean).view(1, -1), upcast(rstd).view(1, -1), upcast(scales).flatten())
        gx, weights, biases = kernel(*given, 1, b * c, space, b * groups, [needs_input, True, True])
        gx = None if gx is None else gx.view(x.shape).to(x.dtype)
        return gx, (None, None, None, None, weights.view(b, c), biases.view(b, c))

    def per_example_gradients(self, saved: Saved, g: Tensor, wanted: Wanted) -> Gradients:
        return saved[4] if wanted[0] else None, saved[5] if wanted[1] else None

    def _sizes(self, x: Tensor) -> tuple[int, int, int, int]:
        return x.shape[0], x.shape[1], math.prod(x.shape[2:]), self.module.num_groups


def _stays_channels_last(x: Tensor) -> bool:
    """Whether the kernel takes x (B, C, H, W) in channels_last without a copy.

    Compares strides, since `is_contiguous` ignores those of axes of length 1, and the kernel does not.
    """
    if x.dim() != 4 or x.is_contiguous() or x.device.type != "cpu":
        return False
    _, channels, height, width = x.shape
    return x.stride() == (channels * height * width, 1, width * channels, channels)
