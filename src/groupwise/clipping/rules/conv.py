"""Convolutions in one, two and three dimensions, with any stride, padding, dilation and groups.

One example's weight gradient is GᵀX for unfolded inputs X (T, K), T output positions and K = c·∏k weights a filter.
Gradients of a few examples at a time are materialised, measured, weighed and added up at once, so that memory stays
at one chunk and nothing is computed twice.
"""

import math
from collections.abc import Iterator
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from groupwise.clipping.factors import drop_zero_rows, scale_rows, weigh_rows
from groupwise.clipping.rules.base import Clip, Gradients, LayerRule, Saved, Wanted, register_rule, upcast
from groupwise.clipping.rules.linear import gram_norms

CHUNK_FLOATS = 1 << 20
"""Numbers that the unfolded inputs, or the per-example gradients, of one chunk may hold: about the size of a cache."""

_CONV = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}


class ConvRule(LayerRule):
    """Convolutions: weight (p, c/groups, *k), bias (p,). `saved` begins with (x, weight used)."""

    parameter_names: ClassVar[tuple[str, ...]] = ("weight", "bias")
    module: Any  # one of the convolution classes: they share these attributes

    @classmethod
    def handles(cls, module: nn.Module) -> bool:
        layer = cls.layer_type
        return super().handles(module) and type(module)._conv_forward is layer._conv_forward  # type: ignore[attr-defined]

    def prepare(self, x: Tensor) -> Tensor:
        """Padding that a convolution cannot do itself (same, reflect, replicate, circular) happens outside."""
        if self._pads_outside():
            mode = "constant" if self.module.padding_mode == "zeros" else self.module.padding_mode
            return F.pad(x, self.module._reversed_padding_repeated_twice, mode=mode)
        return x

    def _pads_outside(self) -> bool:
        return self.module.padding_mode != "zeros" or self.module.padding == "same"

    def _padding(self) -> list[int]:
        if self._pads_outside() or self.module.padding == "valid":
            return [0] * len(self.module.kernel_size)
        return list(self.module.padding)

    def _convolve(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        m = self.module
        return _CONV[x.dim() - 2](x, weight, bias, m.stride, self._padding(), m.dilation, m.groups)

    def _convolve_backward(self, g: Tensor, x: Tensor, weight: Tensor, mask: list[bool]) -> tuple[Tensor, ...]:
        m, zeros = self.module, [0] * (x.dim() - 2)
        rest = (list(m.stride), self._padding(), list(m.dilation), False, zeros, m.groups, mask)
        return torch.ops.aten.convolution_backward(g, x, weight, [weight.shape[0]], *rest)

    def forward(self, x: Tensor, *parameters: Tensor | None) -> tuple[Tensor, Saved]:
        weight, bias = parameters
        assert weight is not None
        return self._convolve(x, weight, bias), (x, weight)

    def input_gradient(self, saved: Saved, g: Tensor) -> Tensor:
        x, weight = saved[:2]
        assert x is not None and weight is not None
        return self._convolve_backward(g, x, weight, [True, False, False])[0]

    def squared_norms(self, saved: Saved, g: Tensor, wanted: Wanted) -> Tensor:
        if not self._wants_weights(wanted):
            return _bias_rows(g).square().sum(1)
        if self._by_gram(g):
            total = torch.cat([gram_norms(x, rows.mT, bias=False) for x, rows in self._unfolded(saved, g)])
        else:
            terms = self._terms(saved)
            total = torch.cat([self._squares(terms, rows, wanted) for rows in self._materialized(saved, g)])
        return total + _bias_rows(g).square().sum(1) if wanted[1] else total

    def weighted_sum(self, saved: Saved, g: Tensor, factors: Tensor | None, wanted: Wanted) -> Gradients:
        x, weight = saved[:2]
        assert x is not None and weight is not None
        mask = [False, self._wants_weights(wanted), wanted[1]]
        rows = (scale_rows(upcast(g), factors), drop_zero_rows(factors, upcast(x)), upcast(weight))
        _, weights, bias = self._convolve_backward(*rows, mask)
        return self._finish(saved, self._flatten(weights) if mask[1] else None, bias if mask[2] else None, wanted)

    def clipped_sum(self, saved: Saved, g: Tensor, clip: Clip, wanted: Wanted) -> Gradients:
        if not self._wants_weights(wanted):
            return super().clipped_sum(saved, g, clip, wanted)
        biases = _bias_rows(g) if wanted[1] else None
        terms, start, factors, weights = self._terms(saved), 0, [], None
        for rows in self._materialized(saved, g):
            square = self._squares(terms, rows, wanted)
            here = slice(start, start := start + len(rows))
            part = clip(square if biases is None else square + biases[here].square().sum(1))
            factors.append(part)
            flat = drop_zero_rows(part, rows).flatten(1)
            weights = part[None] @ flat if weights is None else weights.addmm_(part[None], flat)
        bias = None if biases is None else weigh_rows(torch.cat(factors), biases)
        return self._finish(saved, None if weights is None else weights.view(g.shape[1], -1), bias, wanted)

    def per_example_gradients(self, saved: Saved, g: Tensor, wanted: Wanted) -> Gradients:
        bias = _bias_rows(g) if wanted[1] else None
        if not self._wants_weights(wanted):
            return None, bias
        each = [self._finish(saved, row, None, wanted) for rows in self._materialized(saved, g) for row in rows.clone()]
        parts = [[part for part in column if part is not None] for column in zip(*each, strict=True)]
        stacked = [torch.stack(part) if part else None for part in parts]
        return stacked[0], bias, *stacked[2:]

    def _wants_weights(self, wanted: Wanted) -> bool:
        return wanted[0]

    def _terms(self, saved: Saved) -> Any:
        """What `_squares` needs besides the rows, made once for all chunks."""
        return None

    def _squares(self, terms: Any, rows: Tensor, wanted: Wanted) -> Tensor:
        """Squared norms (n,) of the weight gradients that come from rows (n, p, K) of the weight used."""
        return torch.linalg.vector_norm(rows.flatten(1), dim=1).square()

    def _finish(self, saved: Saved, weights: Tensor | None, bias: Tensor | None, wanted: Wanted) -> Gradients:
        """From the summed gradient (p, K) of the weight used to the gradients of the parameters."""
        return None if weights is None else self._unflatten(weights), bias

    def _by_gram(self, g: Tensor) -> bool:
        """Whether norms come cheaper from two T×T Gram matrices than from the gradients (p, K) themselves."""
        t, k, p = math.prod(g.shape[2:]), self._filter_size(), g.shape[1]
        if self.module.groups > 1 or self.formula == "materialize":
            return False
        return self.formula == "gram" or t * (p + k) < p * k

    def _filter_size(self) -> int:
        """K, the weights of one filter."""
        return math.prod(self.module.kernel_size) * (self.module.in_channels // self.module.groups)

    def _flatten(self, weight: Tensor) -> Tensor:
        """(p, c/groups, *k) -> (p, K) in the order of the unfolded inputs: channels fastest."""
        return weight.movedim(1, -1).flatten(1)

    def _unflatten(self, rows: Tensor) -> Tensor:
        m = self.module
        return rows.view(-1, *m.kernel_size, m.in_channels // m.groups).movedim(-1, 1).contiguous()

    def _unfolded(self, saved: Saved, g: Tensor, most: int | None = None) -> Iterator[tuple[Tensor, Tensor]]:
        """A few examples at a time: inputs (n·groups, T, K) in one buffer, their gradients (n·groups, p/groups, T)."""
        x, groups = saved[0], self.module.groups
        assert x is not None
        t, k = math.prod(g.shape[2:]), self._filter_size()
        gradients = _positions_last(upcast(g), groups)
        step = max(1, min(len(x), CHUNK_FLOATS // (t * k * groups), most or len(x)))
        inner, windows = self._windows(upcast(x[:step]), g.shape[2:])
        buffer = windows.new_empty(windows.shape)
        for start in range(0, len(x), step):
            part = x[start : start + step].movedim(1, -1)
            inner[: len(part)] = part
            columns = buffer[: len(part)].copy_(windows[: len(part)]).view(-1, t, k)
            yield columns, gradients[start * groups : start * groups + len(columns)]

    def _materialized(self, saved: Saved, g: Tensor) -> Iterator[Tensor]:
        """Gradients (n, p, K) of a few examples at a time, in a buffer that the next ones overwrite."""
        p, k, groups = g.shape[1], self._filter_size(), self.module.groups
        step = max(1, min(len(g), CHUNK_FLOATS // (p * k)))
        buffer, filled = upcast(g).new_empty(step * groups, p // groups, k), 0
        for columns, gradients in self._unfolded(saved, g, most=step):
            if filled + len(columns) > len(buffer):
                yield buffer[:filled].view(-1, p, k)
                filled = 0
            torch.bmm(gradients, columns, out=buffer[filled : filled + len(columns)])
            filled += len(columns)
        yield buffer[:filled].view(-1, p, k)

    def _windows(self, x: Tensor, out: torch.Size) -> tuple[Tensor, Tensor]:
        """Room for padded inputs like x (n, c, *space), and what each output position sees of them.

        Returns:
            A view (n, *space, c) to write inputs into, and one (n, groups, *out, *k, c/groups) of the same memory,
            zeros around the inputs included.
        """
        m, padding, groups = self.module, self._padding(), self.module.groups
        n, c, space = x.shape[0], x.shape[1], x.shape[2:]
        padded = x.new_zeros(n, *(size + 2 * pad for size, pad in zip(space, padding, strict=True)), c)
        inner = tuple(slice(pad, pad + size) for size, pad in zip(space, padding, strict=True))
        steps = padded.stride()[1:-1]
        moves = [a * b for a, b in zip(steps, m.stride, strict=True)]
        taps = [a * b for a, b in zip(steps, m.dilation, strict=True)]
        shape = (n, groups, *out, *m.kernel_size, c // groups)
        windows = padded.as_strided(shape, (padded.stride(0), c // groups, *moves, *taps, 1))
        return padded[(slice(None), *inner)], windows


def _bias_rows(g: Tensor) -> Tensor:
    """Per-example gradients (B, p) of the bias, from output gradients (B, p, *out)."""
    return upcast(g).flatten(2).sum(2)


def _positions_last(g: Tensor, groups: int) -> Tensor:
    """Output gradients (B, p, *out) -> (B·groups, p/groups, T), without a copy where the memory has channels last."""
    if groups == 1 and g.dim() == 4 and g.is_contiguous(memory_format=torch.channels_last):
        return g.permute(0, 2, 3, 1).flatten(1, 2).mT
    return g.reshape(g.shape[0] * groups, g.shape[1] // groups, -1)


@register_rule
class Conv1dRule(ConvRule):
    """`nn.Conv1d`."""

    layer_type: ClassVar[type[nn.Module]] = nn.Conv1d


@register_rule
class Conv2dRule(ConvRule):
    """`nn.Conv2d`."""

    layer_type: ClassVar[type[nn.Module]] = nn.Conv2d


@register_rule
class Conv3dRule(ConvRule):
    """`nn.Conv3d`."""

    layer_type: ClassVar[type[nn.Module]] = nn.Conv3d
