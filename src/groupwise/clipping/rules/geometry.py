"""Says what each position of a convolution's output sees of its input, and lays the inputs out for products.

Along its first axis a convolution of stride 1 is not unfolded: positions are rows of memory one after the other, and
what they see through the next tap is the same memory a row further on. So K/k numbers a position are written in the
place of K, for a first axis of k taps, and a product with all of them is k products with parts of them.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from groupwise.clipping.cost_model import self_products
from groupwise.clipping.rules.base import BufferPool

LEAST_WIDTH = 12
"""Numbers a position from which the first axis is left as it is; products with fewer are slower than unfolding."""


@dataclass(frozen=True)
class Span:
    """Outputs from `first` to `last` (not included) along one axis see, through one tap, inputs from `seen` on."""

    first: int
    last: int
    seen: int

    def __len__(self) -> int:
        return self.last - self.first


@dataclass(frozen=True)
class Geometry:
    """A convolution's shape, one entry an axis of space."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    def padded(self, space: Sequence[int]) -> list[int]:
        """Sizes of the padded input."""
        return [size + 2 * pad for size, pad in zip(space, self.padding, strict=True)]

    def out(self, space: Sequence[int]) -> list[int]:
        """Sizes of the output."""
        reaches = [dilation * (taps - 1) + 1 for dilation, taps in zip(self.dilation, self.kernel, strict=True)]
        sizes = zip(self.padded(space), reaches, self.stride, strict=True)
        return [(size - reach) // stride + 1 for size, reach, stride in sizes]

    def spans(self, axis: int, size: int, out: int) -> list[Span]:
        """For each tap along an axis of `size` inputs and `out` outputs: which see which. Padding is left out."""
        found = []
        for tap in range(self.kernel[axis]):
            shift, step = tap * self.dilation[axis] - self.padding[axis], self.stride[axis]
            first = max(0, -(shift // step))
            last = max(first, min(out, (size - 1 - shift) // step + 1))
            found.append(Span(first, last, first * step + shift))
        return found

    # -- gradients ------------------------------------------------------------------------------------------------

    def slides(self, channels: int) -> bool:
        """Whether the first axis is left as it is, for filters that see so many channels."""
        width = math.prod(self.kernel[1:]) * channels
        return self.kernel[0] > 1 and self.stride[0] == 1 and width >= LEAST_WIDTH

    @cached_property
    def across(self) -> "Geometry":
        """The same along all axes of space but the first, where every position sees itself alone."""
        return replace(self, kernel=(1, *self.kernel[1:]), padding=(0, *self.padding[1:]))

    def layout(self, channels: int, space: Sequence[int], out: Sequence[int]) -> "Layout":
        """How a weight's gradient is a sum of products: (what to unfold, its output's space, flat positions a product).

        `channels` are those that one filter sees. Spans are positions of the output and of what was unfolded.
        """
        if not self.slides(channels):
            return self, list(out), [Span(0, math.prod(out), 0)]
        row = math.prod(out[1:])
        spans = self.spans(0, space[0], out[0])
        flat = [Span(span.first * row, span.last * row, span.seen * row) for span in spans]
        return self.across, [space[0], *out[1:]], flat

    def unfolded(self, x: Tensor, out: Sequence[int], step: int, buffers: BufferPool) -> Iterator[Tensor]:
        """X of `step` examples at a time, (n, T, K), in one buffer; x (B, c, *space), out the output's space."""
        as_it_is = math.prod(self.kernel) * math.prod(self.stride) == 1 and list(x.shape[2:]) == list(out)
        if as_it_is and not any(self.padding):
            yield from x.movedim(1, -1).flatten(1, -2).split(step)
            return
        pads = any(self.padding)
        frame = buffers.take("padded", x, min(step, len(x)) if pads else 0, *self.padded(x.shape[2:]), x.shape[1])
        inner = tuple(slice(pad, pad + size) for size, pad in zip(x.shape[2:], self.padding, strict=True))
        for axis, pad in enumerate(self.padding, 1):
            if pad:
                frame.unfold(axis, pad, frame.shape[axis] - pad).zero_()  # both ends
        for part in x.movedim(1, -1).split(step):
            if pads:
                frame[: len(part)][(slice(None), *inner)] = part
                part = frame[: len(part)]
            windows = self._windows(part if math.prod(self.kernel) == 1 else part.contiguous(), out)
            columns = buffers.take("columns", x, *windows.shape).copy_(windows)
            yield columns.view(len(part), math.prod(out), -1)

    def _windows(self, padded: Tensor, out: Sequence[int]) -> Tensor:
        """What each output position sees of padded inputs (n, *space, c): a view (n, *out, *k, c)."""
        each, *steps, channel = padded.stride()
        moves = [a * b for a, b in zip(steps, self.stride, strict=True)]
        taps = [a * b for a, b in zip(steps, self.dilation, strict=True)]
        shape, strides = (len(padded), *out, *self.kernel, padded.shape[-1]), (each, *moves, *taps, channel)
        return padded.as_strided(shape, strides, padded.storage_offset())

    # -- inner products between positions -------------------------------------------------------------------------

    def products_work(self, channels: int, space: Sequence[int], out: Sequence[int]) -> tuple[bool, float, float]:
        """The cheaper way to XXᵀ of one example: (over pixels?, operations, numbers written)."""
        t, pixels, taps = math.prod(out), math.prod(space), math.prod(self.kernel)
        unfolding = 2.0 * t * t * taps * channels, 2.0 * t * taps * channels
        written, sizes = float(pixels**2), list(space)
        for axis, kernel in enumerate(self.kernel):
            sizes[axis] = out[axis]
            written += (1 + 2 * kernel) * math.prod(sizes) ** 2 if self._gathers(axis) else 0
        shifting = 2.0 * pixels * pixels * channels, written
        over_pixels = shifting[0] + 8 * shifting[1] < unfolding[0] + 8 * unfolding[1]  # a number costs as 8 operations
        return over_pixels, *(shifting if over_pixels else unfolding)

    def products(self, x: Tensor, out: Sequence[int], buffers: BufferPool) -> Tensor:
        """XXᵀ (B, T, T) of inputs x (B, c, *space) for one group of channels."""
        if not self.products_work(x.shape[1], x.shape[2:], out)[0]:
            return torch.cat([self_products(columns) for columns in self.unfolded(x, out, len(x), buffers)])
        space, n = x.shape[2:], len(x)
        pixels = x.flatten(2).mT
        pixels = pixels.contiguous() if x.device.type == "cpu" else pixels  # a GPU's products take either order
        between = self_products(pixels).view(n, *space, *space)
        for axis, (size, length) in enumerate(zip(space, out, strict=True)):
            if self._gathers(axis):
                between = self._gather(between, axis, size, length)
        return between.reshape(n, math.prod(out), math.prod(out))

    def _gathers(self, axis: int) -> bool:
        """Whether positions along an axis are anything but the inputs themselves."""
        return (self.kernel[axis], self.stride[axis], self.padding[axis]) != (1, 1, 0)

    def _gather(self, between: Tensor, axis: int, size: int, out: int) -> Tensor:
        """Products between inputs (n, *space, *space), summed over one axis's taps, each at both positions."""
        left, right = 1 + axis, 1 + axis + (between.dim() - 1) // 2
        shape = list(between.shape)
        shape[left] = shape[right] = out
        total = between.new_zeros(shape)
        for span in self.spans(axis, size, out):
            if len(span):
                stop = span.seen + (len(span) - 1) * self.stride[axis] + 1
                target, source = [slice(None)] * len(shape), [slice(None)] * len(shape)
                target[left] = target[right] = slice(span.first, span.last)
                source[left] = source[right] = slice(span.seen, stop, self.stride[axis])
                total[tuple(target)].add_(between[tuple(source)])
        return total


Layout = tuple[Geometry, list[int], list[Span]]
