"""Unfolds inputs as a convolution sees them, and finds inner products between its output positions.

X (T, K) is the unfolded input of one example: T output positions, K = c·∏k numbers that each of them sees.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor

from groupwise.clipping.context import BufferPool
from groupwise.clipping.gram import self_products


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

    def unfolded(self, x: Tensor, out: torch.Size, step: int, buffers: BufferPool) -> Iterator[Tensor]:
        """X of `step` examples at a time, (n·groups, T, K), in one buffer; x (B, c, *space), out the output's space."""
        as_it_is = math.prod(self.kernel) * math.prod(self.stride) * self.groups == 1 and x.shape[2:] == out
        if as_it_is and not any(self.padding):
            yield from x.movedim(1, -1).flatten(1, -2).split(step)
            return
        pads = any(self.padding)
        frame = buffers.take(
            "padded", x, min(step, len(x)) if pads else 0, *self.padded(x.shape[2:]), x.shape[1]
        ).zero_()
        inner = tuple(slice(pad, pad + size) for size, pad in zip(x.shape[2:], self.padding, strict=True))
        for part in x.movedim(1, -1).split(step):
            if pads:
                frame[: len(part)][(slice(None), *inner)] = part
                part = frame[: len(part)]
            windows = self._windows(part.contiguous(), out)
            yield (
                buffers.take("columns", x, *windows.shape)
                .copy_(windows)
                .view(len(part) * self.groups, math.prod(out), -1)
            )

    def _windows(self, padded: Tensor, out: torch.Size) -> Tensor:
        """What each output position sees of padded inputs (n, *space, c): a view (n, groups, *out, *k, c/groups)."""
        steps, channels = padded.stride()[1:-1], padded.shape[-1] // self.groups
        moves = [a * b for a, b in zip(steps, self.stride, strict=True)]
        taps = [a * b for a, b in zip(steps, self.dilation, strict=True)]
        shape = (len(padded), self.groups, *out, *self.kernel, channels)
        return padded.as_strided(shape, (padded.stride(0), channels, *moves, *taps, 1), padded.storage_offset())

    def products_work(self, channels: int, space: Sequence[int], out: Sequence[int]) -> tuple[bool, float, float]:
        """The cheaper way to XXᵀ of one example: (over pixels?, operations, numbers written)."""
        t, pixels, taps = math.prod(out), math.prod(space), math.prod(self.kernel)
        unfolding = 2.0 * t * t * taps * channels, 2.0 * t * taps * channels
        shifting = 2.0 * pixels * pixels * channels, 2.0 * (math.prod(self.padded(space)) ** 2 + taps * t * t)
        over_pixels = shifting[0] + 8 * shifting[1] < unfolding[0] + 8 * unfolding[1]  # a number costs as 8 operations
        return over_pixels, *(shifting if over_pixels else unfolding)

    def products(self, x: Tensor, out: torch.Size, buffers: BufferPool) -> Tensor:
        """XXᵀ (B, T, T) of inputs x (B, c, *space) for one group of channels."""
        if not self.products_work(x.shape[1], x.shape[2:], out)[0]:
            return torch.cat([self_products(columns) for columns in self.unfolded(x, out, len(x), buffers)])
        space, n = x.shape[2:], len(x)
        pixels = x.flatten(2).mT.contiguous()  # (B, ∏space, c)
        between = self_products(pixels).view(n, *space, *space)
        around = [pad for size in reversed(self.padding) for pad in (size, size)]
        between = F.pad(between, around * 2)
        total = between.new_zeros(n, *out, *out)
        for tap in product(*(range(size) for size in self.kernel)):  # positions see the same tap of two windows at once
            seen = tuple(
                slice(i * d, i * d + (size - 1) * s + 1, s)
                for i, d, s, size in zip(tap, self.dilation, self.stride, out, strict=True)
            )
            total += between[(slice(None), *seen, *seen)]
        return total.view(n, math.prod(out), math.prod(out))
