"""Says what each position of a convolution's output sees of its input."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from groupwise.clipping.gram import self_products


@dataclass(frozen=True)
class Geometry:
    """A convolution's shape, one entry an axis of space."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    def windows(self, x: Tensor, out: Sequence[int]) -> Tensor:
        """What each position sees of inputs x (B, c, *space), padding included: a copy (B, K, T), K as in a filter."""
        padded = x.new_zeros(*x.shape[:2], *(n + 2 * pad for n, pad in zip(x.shape[2:], self.padding, strict=True)))
        inner = tuple(slice(pad, pad + n) for n, pad in zip(x.shape[2:], self.padding, strict=True))
        padded[(slice(None), slice(None), *inner)] = x
        each, channel, *steps = padded.stride()
        taps = [step * dilation for step, dilation in zip(steps, self.dilation, strict=True)]
        moves = [step * stride for step, stride in zip(steps, self.stride, strict=True)]
        shape, strides = (*x.shape[:2], *self.kernel, *out), (each, channel, *taps, *moves)
        return padded.as_strided(shape, strides).reshape(len(x), -1, math.prod(out))

    # -- inner products between positions -------------------------------------------------------------------------

    def products_work(self, channels: int, space: Sequence[int], out: Sequence[int]) -> tuple[float, float]:
        """What XXᵀ of one example takes: operations, and numbers written."""
        pixels, sizes = math.prod(space), list(space)
        written = float(pixels**2)
        for axis, kernel in enumerate(self.kernel):
            sizes[axis] = out[axis]
            written += (1 + 2 * kernel) * math.prod(sizes) ** 2 if self._gathers(axis) else 0
        return 2.0 * pixels * pixels * channels, written

    def products(self, x: Tensor, out: Sequence[int]) -> Tensor:
        """XXᵀ (B, T, T) of inputs x (B, c, *space) for one group of channels, from those of pixels."""
        space, n = x.shape[2:], len(x)
        pixels = x.flatten(2).mT
        between = self_products(pixels.contiguous() if x.device.type == "cpu" else pixels).view(n, *space, *space)
        for axis in range(len(space)):
            if self._gathers(axis):
                between = self._gather(between, axis, space[axis], out[axis])
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
        for tap in range(self.kernel[axis]):
            shift, step = tap * self.dilation[axis] - self.padding[axis], self.stride[axis]
            first = max(0, -(shift // step))
            last = min(out, (size - 1 - shift) // step + 1)  # outputs that see through this tap no padding
            if last > first:
                target, source = [slice(None)] * len(shape), [slice(None)] * len(shape)
                target[left] = target[right] = slice(first, last)
                seen = first * step + shift
                source[left] = source[right] = slice(seen, seen + (last - first - 1) * step + 1, step)
                total[tuple(target)].add_(between[tuple(source)])
        return total
