"""Clips convolutions in one to three dimensions, with any stride, padding, dilation and groups."""

import math
from collections.abc import Sequence
from functools import cached_property
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from groupwise.clipping import matmul
from groupwise.clipping.factors import scale_rows
from groupwise.clipping.gram import inner_products, norms_from_products
from groupwise.clipping.norm_methods import Rates, seconds
from groupwise.clipping.norm_terms import Terms
from groupwise.clipping.precision import (
    LONGEST_SUM,
    batched_product,
    inflate_norms,
    keeps_half,
    second_product_slack,
    squared_row_norms,
    upcast,
)
from groupwise.clipping.rules.base import Gradients, LayerRule, Saved, Wanted, chunk_floats, register_rule

GROUPED_FLOATS = 3 << 16
"""Weight entries up to which a CPU's kernel for grouped convolutions stays in its cache; with more it is far slower."""

ALONE_FLOATS = 20480
"""Input entries of one example from which torch has a fast kernel for a single example."""
COPIED_FLOATS = 1 << 18
"""Output-gradient entries that the grouped kernel may copy at a time."""

FEW_ROWS, MANY_WEIGHTS = 64, 1 << 18
"""With at most so many positions and at least so many weights, a CPU's kernel for the weight gradient is 3 times slower
than a product of output gradients and unfolded inputs."""

_FORWARDS = {kind._conv_forward for kind in (nn.Conv1d, nn.Conv2d, nn.Conv3d)}
"""The methods of torch's own convolutions, which a subclass must not override."""


@register_rule
class ConvRule(LayerRule):
    """Convolutions: weight (p, c/groups, *k), bias (p,). `saved` begins with (x, weight used)."""

    layer_type: ClassVar[Any] = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
    parameter_names: ClassVar[tuple[str, ...]] = ("weight", "bias")
    module: Any  # one of the convolution classes: they share these attributes

    @classmethod
    def handles(cls, module: nn.Module) -> bool:
        return super().handles(module) and getattr(type(module), "_conv_forward", None) in _FORWARDS

    def has_batch(self, axes: int) -> bool:
        return axes == len(self.module.kernel_size) + 2

    def prepare(self, x: Tensor) -> Tensor:
        """Apply padding that the convolution kernel cannot do (same, reflect, replicate, circular)."""
        if self._pads_outside:
            mode = "constant" if self.module.padding_mode == "zeros" else self.module.padding_mode
            return F.pad(x, self.module._reversed_padding_repeated_twice, mode=mode)
        return x

    @cached_property
    def _pads_outside(self) -> bool:
        return self.module.padding_mode != "zeros" or self.module.padding == "same"

    @cached_property
    def padding(self) -> tuple[int, ...]:
        """The zeros that the kernel adds at both ends of each spatial axis."""
        unpadded = self._pads_outside or self.module.padding == "valid"
        return (0,) * len(self.module.kernel_size) if unpadded else tuple(self.module.padding)

    def forward(self, x: Tensor, *parameters: Any) -> tuple[Tensor, Saved]:
        weight, bias = parameters
        return self.convolve(x, weight, bias), (x, weight)

    def convolve(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """The layer's output with any weight."""
        return torch.convolution(x, weight, bias, *self._settings())

    def _settings(self, examples: int = 1) -> tuple[Any, ...]:
        """Stride, padding, dilation, transposed (False), output padding, and the groups of channels of all examples."""
        m = self.module
        return m.stride, self.padding, m.dilation, False, [0] * len(m.kernel_size), examples * m.groups

    def input_gradient(self, saved: Saved, g: Tensor) -> Tensor:
        x, weight = saved[:2]
        return self._backward(g, x, weight, [True, False, False])[0]

    def _backward(self, g: Tensor, x: Tensor, weight: Tensor, mask: list[bool]) -> tuple[Tensor, ...]:
        """The gradients of input, weight and bias that the mask selects."""
        sizes = [self.module.out_channels]
        return torch.ops.aten.convolution_backward(g, x, weight, sizes, *self._settings(), mask)

    def windows(self, x: Tensor, out: Sequence[int]) -> Tensor:
        """Unfold inputs x (B, c, *space), padding included: a copy (B, K, T), where K is the size of a filter."""
        padded = x.new_zeros(*x.shape[:2], *(n + 2 * pad for n, pad in zip(x.shape[2:], self.padding, strict=True)))
        inner = tuple(slice(pad, pad + n) for n, pad in zip(x.shape[2:], self.padding, strict=True))
        padded[(slice(None), slice(None), *inner)] = x
        each, channel, *steps = padded.stride()
        taps = [step * dilation for step, dilation in zip(steps, self.module.dilation, strict=True)]
        moves = [step * stride for step, stride in zip(steps, self.module.stride, strict=True)]
        shape, strides = (*x.shape[:2], *self.module.kernel_size, *out), (each, channel, *taps, *moves)
        return padded.as_strided(shape, strides).reshape(len(x), -1, math.prod(out))

    # -- inner products between positions -------------------------------------------------------------------------

    def products_work(self, channels: int, space: Sequence[int], out: Sequence[int]) -> tuple[float, float]:
        """The cost of one example's XXᵀ: operations, and entries written."""
        pixels, sizes = math.prod(space), list(space)
        written = float(pixels**2)
        for axis, kernel in enumerate(self.module.kernel_size):
            sizes[axis] = out[axis]
            written += (1 + 2 * kernel) * math.prod(sizes) ** 2 if self._gathers(axis) else 0
        return 2.0 * pixels * pixels * channels, written

    def products(self, x: Tensor, out: Sequence[int]) -> Tensor:
        """XXᵀ (B, T, T) of the unfolded inputs x (B, c, *space), without unfolding: from inner products of pixels."""
        space, n = x.shape[2:], len(x)
        pixels = x.flatten(2).mT.contiguous() if x.device.type == "cpu" else x.flatten(2).mT
        between = inner_products(pixels, pixels).view(n, *space, *space)
        for axis in range(len(space)):
            if self._gathers(axis):
                between = self._gather(between, axis, space[axis], out[axis])
        return between.reshape(n, math.prod(out), math.prod(out))

    def _gathers(self, axis: int) -> bool:
        """Whether unfolding changes an axis: not for kernel 1, stride 1 and no padding."""
        return (self.module.kernel_size[axis], self.module.stride[axis], self.padding[axis]) != (1, 1, 0)

    def _gather(self, between: Tensor, axis: int, size: int, out: int) -> Tensor:
        """Sum products between pixels (n, *space, *space) over the taps of one axis, both shifted by the same tap."""
        left, right = 1 + axis, 1 + axis + (between.dim() - 1) // 2
        shape = list(between.shape)
        shape[left] = shape[right] = out
        total = between.new_zeros(shape)
        for tap in range(self.module.kernel_size[axis]):
            shift, step = tap * self.module.dilation[axis] - self.padding[axis], self.module.stride[axis]
            first = max(0, -(shift // step))
            last = min(out, (size - 1 - shift) // step + 1)  # outputs for which this tap is not in the padding
            if last > first:
                target, source = [slice(None)] * len(shape), [slice(None)] * len(shape)
                target[left] = target[right] = slice(first, last)
                seen = first * step + shift
                source[left] = source[right] = slice(seen, seen + (last - first - 1) * step + 1, step)
                total[tuple(target)].add_(between[tuple(source)])
        return total

    # -- norms and sums -------------------------------------------------------------------------------------------

    def squared_norms(self, saved: Saved, g: Tensor, wanted: Wanted) -> Terms | Tensor | None:
        if not self.needs_filters(wanted):
            return squared_row_norms(_over_space(g))
        x, out = saved[0], g.shape[2:]
        kind = f"{x.device.type} bfloat16" if keeps_half(x, g) else x.device.type
        if self.module.groups > 1 or self.methods.choose((x.shape, g.shape), kind, self._costs) == "materialize":
            return None
        held = int(self.products_work(x.shape[1], x.shape[2:], out)[1]) + 3 * out.numel() ** 2
        step = max(1, chunk_floats(g) // held)
        parts = (self.examples(saved, g, slice(start, start + step)) for start in range(0, len(g), step))
        squares = torch.cat([self.gram_norms(*part, wanted) for part in parts])
        if out.numel() <= LONGEST_SUM:  # then the slack of the norms covers the rounding of the sum too
            return squares
        return inflate_norms(squares, self._slack(saved, g))

    def needs_filters(self, wanted: Wanted) -> bool:
        """Whether gradients of the filters are needed."""
        return wanted[0]

    def gram_norms(self, saved: Saved, g: Tensor, wanted: Wanted) -> Tensor:
        """Squared norms (n,) from XXᵀ and GGᵀ."""
        x, rows = upcast(saved[0]), upcast(g)
        longest = max(rows.shape[2:].numel(), math.prod(self._filter()), rows.shape[1])
        flat = positions_first(rows)
        squares = norms_from_products(self.products(x, rows.shape[2:]), inner_products(flat, flat), longest)
        return squares + squared_row_norms(_over_space(g)) if wanted[1] else squares

    def formed_norms(self, saved: Saved, g: Tensor, wanted: Wanted) -> Tensor:
        return inflate_norms(super().formed_norms(saved, g, wanted), self._slack(saved, g))

    def _slack(self, saved: Saved, g: Tensor) -> Tensor:
        taps = math.prod(self.module.kernel_size)  # an input entry occurs in at most so many positions
        return taps**0.5 * second_product_slack(saved[0], g, g.shape[2:].numel())

    def weighted_sum(self, saved: Saved, g: Tensor, factors: Tensor | None, wanted: Wanted) -> Gradients:
        x, weight = saved[:2]
        bias = None
        if wanted[1]:  # sum over positions first, as the norms do
            sums = _over_space(g)
            bias = sums.sum(0) if factors is None else factors.to(sums.dtype) @ sums
        if not wanted[0]:
            return None, bias
        gradients, inputs = scale_rows(upcast(g), factors), upcast(x)
        deep = weight.numel() >= MANY_WEIGHTS and len(g) * g.shape[2:].numel() <= FEW_ROWS
        if deep and g.device.type == "cpu" and self.module.groups == 1:
            seen = self.windows(inputs, g.shape[2:]).transpose(1, 2).flatten(0, 1)
            return matmul.product(gradients.transpose(0, 1).flatten(1), seen).view(weight.shape), bias
        return self._backward(gradients, inputs, upcast(weight), [False, True, False])[1], bias

    def per_example_gradients(self, saved: Saved, g: Tensor, wanted: Wanted) -> Gradients:
        x, weight = saved[0], None
        if wanted[0]:
            if x.device.type == "cpu" or self.module.groups > 1:
                weight = self._by_groups(upcast(x), upcast(g))
            else:
                windows = self.windows(x, g.shape[2:])
                weight = batched_product(g.flatten(2), windows.mT).view(len(x), -1, *self._filter())
        return weight, _over_space(g) if wanted[1] else None

    def chunk(self, g: Tensor, wanted: Wanted) -> int:
        if g.device.type != "cpu":
            return super().chunk(g, wanted)
        if not g.is_contiguous() and self.module.in_channels * g[0, 0].numel() >= ALONE_FLOATS:
            return 1  # in channels_last several examples would be copied, a single one is not
        return max(1, min(GROUPED_FLOATS // max(1, self.size(wanted)), COPIED_FLOATS // max(1, g[0].numel())))

    def _by_groups(self, x: Tensor, g: Tensor) -> Tensor:
        """Weight gradients (B, p, c/groups, *k), by one kernel call in which each example is a group of channels."""
        n, shape = len(x), self._filter()
        like = g.new_empty(1).expand(n * g.shape[1], *shape)
        gradients, inputs = g.reshape(1, -1, *g.shape[2:]), x.reshape(1, -1, *x.shape[2:])
        rest = (*self._settings(n), [False, True, False])
        weights = torch.ops.aten.convolution_backward(gradients, inputs, like, [len(like)], *rest)[1]
        return weights.view(n, -1, *shape)

    def _filter(self) -> tuple[int, ...]:
        """The shape of one filter: input channels, and kernel size."""
        return self.module.in_channels // self.module.groups, *self.module.kernel_size

    def _costs(self, rates: Rates, inputs: torch.Size, out: torch.Size) -> dict[str, float]:
        t, p, k = out[2:].numel(), out[1], math.prod(self._filter())
        reused = self.methods.reuses(inputs[0] * p * k, out.numel() + inputs.numel())
        products = self.products_work(inputs[1], inputs[2:], out[2:])
        return seconds(rates, inputs[0], t, k, p, reused, products)


def _over_space(g: Tensor) -> Tensor:
    """The bias's per-example gradients (B, p), from output gradients (B, p, *out)."""
    return g.flatten(2).sum(2, dtype=torch.promote_types(g.dtype, torch.float32))


def positions_first(g: Tensor) -> Tensor:
    """Output gradients (B, p, *out) -> (B, T, p), without a copy in channels_last."""
    if g.dim() == 4 and g.is_contiguous(memory_format=torch.channels_last):
        return g.permute(0, 2, 3, 1).flatten(1, 2)
    return g.flatten(2).mT
