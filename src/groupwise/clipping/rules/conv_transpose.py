"""Clips transposed convolutions: the weight's gradient is a convolution's, with input and output gradient exchanged.

y = convᵀ(x, w) has ⟨g, y⟩ = ⟨conv(g, w), x⟩, so w (c, p/groups, *k) is the weight of a convolution from p channels to c
whose input is g and whose output gradient is x. All that a convolution knows of norms and sums (`conv.py`) is used
as it is; only the bias, which adds to y, is a matter of its own.
"""

from dataclasses import replace
from functools import cached_property
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from groupwise.clipping.rules.base import Saved, register_rule
from groupwise.clipping.rules.conv import ConvRule
from groupwise.clipping.rules.geometry import Geometry

_TRANSPOSED = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}


@register_rule
class ConvTransposeRule(ConvRule):
    """Transposed convolutions: weight (c, p/groups, *k), bias (p,). `saved` is (x, weight)."""

    layer_type: ClassVar[Any] = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)

    def forward(self, x: Tensor, *parameters: Any) -> tuple[Tensor, Saved]:
        weight, bias = parameters
        m = self.module
        rest = m.stride, m.padding, m.output_padding, m.groups, m.dilation
        return _TRANSPOSED[x.dim() - 2](x, weight, bias, *rest), (x, weight)  # type: ignore[operator]

    def sides(self, saved: Saved, g: Tensor) -> tuple[Tensor, Tensor]:
        """Output gradients (B, p, *out) and inputs (B, c, *space): what the convolution the other way reads."""
        x, shape = saved[0], self.geometry
        if any(self.module.output_padding):
            sizes = zip(x.shape[2:], g.shape[2:], shape.kernel, shape.stride, shape.dilation, strict=True)
            read = [(n - 1) * step + dilation * (taps - 1) + 1 - out for n, out, taps, step, dilation in sizes]
            pads = [(pad, more - pad) for pad, more in zip(self.module.padding, read, strict=True)]
            g = F.pad(g, [pad for axis in reversed(pads) for pad in axis])
        return g, x

    @cached_property
    def geometry(self) -> Geometry:
        """The convolution's the other way; with output padding `sides` pads for it."""
        shape = super().geometry
        return replace(shape, padding=(0,) * len(shape.padding)) if any(self.module.output_padding) else shape

    def _filter(self) -> tuple[int, ...]:
        return self.module.out_channels // self.module.groups, *self.module.kernel_size

    def _backward(self, g: Tensor, x: Tensor, weight: Tensor, mask: list[bool]) -> tuple[Tensor, ...]:
        """Gradients of the layer's input, weight and bias, where the mask asks for them."""
        m = self.module
        rest = (m.stride, m.padding, m.dilation, True, m.output_padding, m.groups, mask)
        return torch.ops.aten.convolution_backward(g, x, weight, [m.out_channels], *rest)
