"""Clips GroupNorm.

One example's weight gradient is Σ g∘x̂ and its bias gradient Σ g over all positions of a channel. Torch's kernel has
both on its way to the input gradient, and adds them up over its batch: so it is given one example with the channels
of all. It takes contiguous tensors only. On a CPU, channels_last stays, and sums of g and g∘x serve instead.
"""

import math
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from groupwise.clipping.precision import upcast
from groupwise.clipping.rules.base import Gradients, LayerRule, Saved, Wanted, register_rule

LARGEST_GRID = 65_535
"""Groups of all examples together that CUDA's backward kernel takes: a block each, on a grid's second axis."""


@register_rule
class GroupNormRule(LayerRule):
    """`nn.GroupNorm` on (B, C, ...): weight (C,), bias (C,)."""

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
        """The input gradient, and in the place of the rest the gradients (B, C) of weight and bias."""
        x, weight, mean, rstd = saved[:4]
        kernel, (b, c, space, groups) = torch.ops.aten.native_group_norm_backward, self._sizes(x)
        if _stays_channels_last(x):
            masks = [needs_input, False, False]
            gx = kernel(g, x, mean, rstd, weight, b, c, space, groups, masks)[0] if needs_input else None
            wide, g = upcast(x), upcast(g)
            biases = g.sum((2, 3))
            centred = (g * wide).sum((2, 3)).view(b, groups, -1) - biases.view(b, groups, -1) * mean.unsqueeze(2)
            return gx, (None, None, None, None, (centred * rstd.unsqueeze(2)).view(b, c), biases)
        scales = (x.new_ones(c) if weight is None else weight).expand(b, c)
        parts, step = [], max(1, LARGEST_GRID // groups)
        for i in range(0, b, step):
            n = min(step, b - i)
            given = (*(upcast(t[i : i + n]) for t in (g, x)), *(upcast(t[i : i + n]) for t in (mean, rstd, scales)))
            rows = [t.reshape(1, -1) for t in given[2:4]]
            parts.append(
                kernel(*given[:2], *rows, given[4].flatten(), 1, n * c, space, n * groups, [needs_input, True, True])
            )
        gx, weights, biases = (
            part[0] if len(part) == 1 or part[0] is None else torch.cat([t.flatten() for t in part])
            for part in zip(*parts, strict=True)
        )
        gx = None if gx is None else gx.view(x.shape).to(x.dtype)
        return gx, (None, None, None, None, weights.view(b, c), biases.view(b, c))

    def per_example_gradients(self, saved: Saved, g: Tensor, wanted: Wanted) -> Gradients:
        return saved[4] if wanted[0] else None, saved[5] if wanted[1] else None

    def _sizes(self, x: Tensor) -> tuple[int, int, int, int]:
        return x.shape[0], x.shape[1], math.prod(x.shape[2:]), self.module.num_groups


def _stays_channels_last(x: Tensor) -> bool:
    """Whether the kernel takes x (B, C, H, W) as it is, in channels_last.

    `is_contiguous` ignores the stride of an axis of length 1, which the kernel looks at: so strides are compared.
    """
    if x.dim() != 4 or x.is_contiguous() or x.device.type != "cpu":
        return False
    _, channels, height, width = x.shape
    return x.stride() == (channels * height * width, 1, width * channels, channels)
