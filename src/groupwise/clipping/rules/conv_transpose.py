"""Clips transposed convolutions: the weight's gradient is a convolution's, with input and output gradient exchanged.

y = convᵀ(x, w) has ⟨g, y⟩ = ⟨conv(g, w), x⟩, so w (c, p/groups, *k) is the weight of a convolution from p channels to c
whose input is g and whose output gradient is x. All that a convolution knows of norms and sums (`conv.py`) is used
as it is; only the bias, which adds to y, is a matter of its own.
"""

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from groupwise.clipping.context import RuleContext
from groupwise.clipping.factors import weigh_rows
from groupwise.clipping.rules.base import (
    Clip,
    Finish,
    Gradients,
    LayerRule,
    Saved,
    Wanted,
    in_format_of,
    register_rule,
)
from groupwise.clipping.rules.conv import ConvRule
from groupwise.clipping.squared_norms import squared_row_norms, upcast

WEIGHT_ALONE = (True, False)

_TRANSPOSED = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}


class Exchanged(ConvRule):
    """The convolution from outputs to inputs: `saved` = (output gradient, weight), g = the layer's input."""

    def _channels(self) -> int:
        return self.module.out_channels // self.module.groups

    def _convolve_backward(self, g: Tensor, x: Tensor, weight: Tensor, mask: list[bool]) -> tuple[Tensor, ...]:
        """The weight's gradient at [1], by the layer's own kernel, which knows of output padding."""
        return transposed_backward(self.module, x, g, weight, mask)


class ConvTransposeRule(LayerRule):
    """Transposed convolutions: weight (c, p/groups, *k), bias (p,). `saved` is (x, weight)."""

    parameter_names: ClassVar[tuple[str, ...]] = ("weight", "bias")
    module: Any  # one of the classes of transposed convolutions: they share these attributes

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self._exchanged = Exchanged(module)

    def forward(self, x: Tensor, *parameters: Tensor | None) -> tuple[Tensor, Saved]:
        weight, bias = parameters
        assert weight is not None
        m = self.module
        rest = m.stride, m.padding, m.output_padding, m.groups, m.dilation
        return _TRANSPOSED[x.dim() - 2](x, weight, bias, *rest), (x, weight)  # type: ignore[operator]

    def arrange(self, saved: Saved, g: Tensor) -> Tensor:
        assert saved[0] is not None
        return in_format_of(saved[0], g)

    def input_gradient(self, saved: Saved, g: Tensor) -> Tensor:
        x, weight = saved
        assert x is not None and weight is not None
        return transposed_backward(self.module, g, x, weight, [True, False, False])[0]

    def squared_norms(self, saved: Saved, g: Tensor, wanted: Wanted, context: RuleContext) -> Tensor:
        biases = squared_row_norms(_bias_gradients(g)) if wanted[1] else None
        if not wanted[0]:
            assert biases is not None
            return biases
        squares = self._exchanged.squared_norms(*_exchange(saved, g), WEIGHT_ALONE, context)
        return squares if biases is None else squares + biases

    def weighted_sum(
        self, saved: Saved, g: Tensor, factors: Tensor | None, wanted: Wanted, context: RuleContext
    ) -> Gradients:
        weight = None
        if wanted[0]:
            weight = self._exchanged.weighted_sum(*_exchange(saved, g), factors, WEIGHT_ALONE, context)[0]
        if not wanted[1]:
            return weight, None
        rows = _bias_gradients(g)
        return weight, rows.sum(0) if factors is None else weigh_rows(factors, rows)

    def clipped_sum(self, saved: Saved, g: Tensor, clip: Clip, wanted: Wanted, context: RuleContext) -> Gradients:
        if not wanted[0]:
            return super().clipped_sum(saved, g, clip, wanted, context)
        biases, factors = (_bias_gradients(g) if wanted[1] else None), list[Tensor]()

        def clip_both(squares: Tensor) -> Tensor:
            start = sum(len(part) for part in factors)
            if biases is not None:
                squares = squares + squared_row_norms(biases[start : start + len(squares)])
            factors.append(clip(squares))
            return factors[-1]

        weight = self._exchanged.clipped_sum(*_exchange(saved, g), clip_both, WEIGHT_ALONE, context)[0]
        return weight, None if biases is None else weigh_rows(torch.cat(factors), biases)

    def book_keep(self, saved: Saved, g: Tensor, wanted: Wanted, context: RuleContext) -> tuple[Tensor, Finish]:
        if not wanted[0]:
            return super().book_keep(saved, g, wanted, context)
        squares, finish = self._exchanged.book_keep(*_exchange(saved, g), WEIGHT_ALONE, context)
        if not wanted[1]:
            return squares, finish
        biases = _bias_gradients(g)

        def finish_both(factors: Tensor) -> Gradients:
            return finish(factors)[0], weigh_rows(factors, biases)

        return squares + squared_row_norms(biases), finish_both

    def per_example_gradients(self, saved: Saved, g: Tensor, wanted: Wanted) -> Gradients:
        exchanged = _exchange(saved, g)
        weight = self._exchanged.per_example_gradients(*exchanged, WEIGHT_ALONE)[0] if wanted[0] else None
        return weight, _bias_gradients(g) if wanted[1] else None


def _exchange(saved: Saved, g: Tensor) -> tuple[Saved, Tensor]:
    """What the convolution the other way saw."""
    x, weight = saved
    assert x is not None
    return (g, weight), x


def _bias_gradients(g: Tensor) -> Tensor:
    """Per-example gradients (B, p) of the bias, from output gradients (B, p, *out)."""
    return upcast(g).flatten(2).sum(2)


def transposed_backward(m: Any, g: Tensor, x: Tensor, weight: Tensor, mask: list[bool]) -> tuple[Tensor, ...]:
    """Gradients of a transposed convolution's input, weight and bias, where the mask asks for them."""
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
