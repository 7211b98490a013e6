"""Clips transposed convolutions: the weight's gradient is a convolution's, with input and output gradient exchanged.

y = convᵀ(x, w) has ⟨g, y⟩ = ⟨conv(g, w), x⟩, so w (c, p/groups, *k) is the weight of a convolution from p channels to c
whose input is g and whose output gradient is x. All that a convolution knows of norms and sums (`conv.py`) is used
as it is; only the bias, which adds to y, is a matter of its own.
"""

from dataclasses import replace
from functools import cached_property
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from groupwise.clipping.factors import drop_zero_rows, scale_rows
from groupwise.clipping.precision import upcast
from groupwise.clipping.rules.base import Gradients, RuleContext, Saved, Wanted, register_rule
from groupwise.clipping.rules.conv import ConvRule
from groupwise.clipping.rules.geometry import Geometry

_TRANSPOSED = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}


class ConvTransposeRule(ConvRule):
    """Transposed convolutions: weight (c, p/groups, *k), bias (p,). `saved` is (x, weight)."""

    def forward(self, x: Tensor, *parameters: Tensor | None) -> tuple[Tensor, Saved]:
        weight, bias = parameters
        assert weight is not None
        m = self.module
        rest = m.stride, m.padding, m.output_padding, m.groups, m.dilation
        return _TRANSPOSED[x.dim() - 2](x, weight, bias, *rest), (x, weight)  # type: ignore[operator]

    def input_gradient(self, saved: Saved, g: Tensor) -> Tensor:
        x, weight = saved
        assert x is not None and weight is not None
        return self._transposed_backward(g, x, weight, [True, False, False])[0]

    def sides(self, saved: Saved, g: Tensor) -> tuple[Tensor, Tensor]:
        """Output gradients (B, p, *out) and inputs (B, c, *space): what the convolution the other way reads."""
        x, shape = saved[0], self.geometry
        assert x is not None
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

    def weighted_sum(
        self, saved: Saved, g: Tensor, factors: Tensor | None, wanted: Wanted, context: RuleContext
    ) -> Gradients:
        x, weight = saved
        assert x is not None and weight is not None
        rows = scale_rows(upcast(g), factors), drop_zero_rows(factors, upcast(x)), upcast(weight)
        _, weights, bias = self._transposed_backward(*rows, [False, *wanted])
        return weights if wanted[0] else None, bias if wanted[1] else None

    def _filter(self) -> tuple[int, ...]:
        return self.module.out_channels // self.module.groups, *self.module.kernel_size

    def _transposed_backward(self, g: Tensor, x: Tensor, weight: Tensor, mask: list[bool]) -> tuple[Tensor, ...]:
        """Gradients of the layer's input, weight and bias, where the mask asks for them."""
        m = self.module
        rest = (m.stride, m.padding, m.dilation, True, m.output_padding, m.groups, mask)
        return torch.ops.aten.convolution_backward(g, x, weight, [m.out_channels], *rest)


@register_rule
class ConvTranspose1dRule(ConvTransposeRule):
    """`nn.ConvTranspose1d`."""

    layer_type: ClassVar[type[nn.Module]] = nn.ConvTranspose1d


@register_rule
class ConvTranspose2dRule(ConvTransposeRule):
    """`nn.ConvTranspose2d`."""

    layer_type: ClassVar[type[nn.Module]] = nn.ConvTranspose2d


@register_rule
class ConvTranspose3dRule(ConvTransposeRule):
    """`nn.ConvTranspose3d`."""

    layer_type: ClassVar[type[nn.Module]] = nn.ConvTranspose3d
