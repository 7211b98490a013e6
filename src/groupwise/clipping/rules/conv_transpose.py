"""Clips transposed convolutions: the weight's gradient is a convolution's, with input and output gradient exchanged.

y = convᵀ(x, w) has ⟨g, y⟩ = ⟨conv(g, w), x⟩, so w (c, p/groups, *k) is the weight of a convolution from p channels to c
whose input is g and whose output gradient is x. All that a convolution knows of norms and sums (`conv.py`) is used
as it is; only the bias, which adds to y, is a matter of its own.
"""

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from groupwise.clipping.factors import weigh_rows
from groupwise.clipping.precision import upcast
from groupwise.clipping.rules.base import Gradients, RuleContext, Saved, Wanted, register_rule
from groupwise.clipping.rules.conv import ConvRule

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

    def rows(self, saved: Saved, g: Tensor) -> tuple[Tensor, Tensor]:
        """Output gradients (B, p, *out) and inputs (B, c, *space): what the convolution the other way reads."""
        x, g = super().rows(saved, g)
        return g, x

    def weighted_sum(
        self, saved: Saved, g: Tensor, factors: Tensor | None, wanted: Wanted, context: RuleContext
    ) -> Gradients:
        weight = bias = None
        if wanted[0]:
            weight = super().weighted_sum(saved, g, factors, (True, False), context)[0]
        if wanted[1]:
            biases = upcast(g).flatten(2).sum(2)
            bias = biases.sum(0) if factors is None else weigh_rows(factors, biases)
        return weight, bias

    def bias_gradients(self, saved: Saved, g: Tensor) -> Tensor:
        """The bias's gradients (B, p), from output gradients, which are in the input's place."""
        outputs = saved[0]
        assert outputs is not None
        return outputs.flatten(2).sum(2, dtype=torch.promote_types(outputs.dtype, torch.float32))

    def _channels(self) -> int:
        return int(self.module.out_channels // self.module.groups)

    def _convolve_backward(self, g: Tensor, x: Tensor, weight: Tensor, mask: list[bool]) -> tuple[Tensor, ...]:
        """The weight's gradient at [1], by the layer's own kernel, which knows of output padding."""
        return self._transposed_backward(x, g, weight, mask)

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
