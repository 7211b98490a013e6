"""The geometry of a convolution: what each output position sees of the input, and inner products between positions.

X (T, K) is the unfolded input of one example: T output positions, K = c·∏k numbers that each of them sees.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor


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

    def unfolded(self, x: Tensor, out: torch.Size, step: int) -> Iterator[Tensor]:
        """X of `step` examples at a time, (n·groups, T, K), in one buffer; x (B, c, *space), out the output's space."""
        inner, windows = self._windows(x[:step], out)
        buffer = windows.new_empty(windows.shape)
        for part in x.split(step):
            inner[: len(part)] = part.movedim(1, -1)
            yield buffer[: len(part)].copy_(windows[: len(part)]).view(len(part) * self.groups, math.prod(out), -1)

    def _windows(self, x: Tensor, out: torch.Size) -> tuple[Tensor, Tensor]:
        """Room for padded inputs like x (n, c, *space), and what each output position sees of them.

        Returns:
            A view (n, *space, c) to write inputs into, and one (n, groups, *out, *k, c/groups) of the same memory,
            zeros around the inputs included.
        """
        n, c, space = x.shape[0], x.shape[1], x.shape[2:]
        padded = x.new_zeros(n, *self.padded(space), c)
        inner = tuple(slice(pad, pad + size) for size, pad in zip(space, self.padding, strict=True))
        steps = padded.stride()[1:-1]
        moves = [a * b for a, b in zip(steps, self.stride, strict=True)]
        taps = [a * b for a, b in zip(steps, self.dilation, strict=True)]
        shape = (n, self.groups, *out, *self.kernel, c // self.groups)
        windows = padded.as_strided(shape, (padded.stride(0), c // self.groups, *moves, *taps, 1))
        return padded[(slice(None), *inner)], windows

    def products_work(self, channels: int, space: Sequence[int], out: Sequence[int]) -> tuple[bool, float, float]:
        """The cheaper way to XXᵀ of one example: (over pixels?, operations, numbers written)."""
        t, pixels, taps = math.prod(out), math.prod(space), math.prod(self.kernel)
        unfolding = 2.0 * t * t * taps * channels, 2.0 * t * taps * channels
        shifting = 2.0 * pixels * pixels * channels, 2.0 * (math.prod(self.padded(space)) ** 2 + taps * t * t)
        over_pixels = shifting[0] + 8 * shifting[1] < unfolding[0] + 8 * unfolding[1]  # a number costs as 8 operations
        return over_pixels, *(shifting if over_pixels else unfolding)

    def products(self, x: Tensor, out: torch.Size) -> Tensor:
        """XXᵀ (B, T, T) of inputs x (B, c, *space) for one group of channels."""
        if not self.products_work(x.shape[1], x.shape[2:], out)[0]:
            return torch.cat([torch.bmm(columns, columns.mT) for columns in self.unfolded(x, out, len(x))])
        space, n = x.shape[2:], len(x)
        pixels = x.flatten(2).mT.contiguous()  # (B, ∏space, c)
        between = torch.bmm(pixels, pixels.mT).view(n, *space, *space)
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
