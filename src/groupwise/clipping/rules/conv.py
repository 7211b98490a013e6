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

CHUNK_FLOATS = 1 << 22
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
            return self._bias_squares(g)
        squares, terms = [], self._terms(saved)
        for x, gradient in self._chunks(saved, g):
            if self._by_gram(x, gradient):
                squares.append(gram_norms(x.squeeze(1), gradient.squeeze(1).mT, bias=False))
            else:
                squares.append(self._squares(terms, _materialize(x, gradient), wanted))
        total = torch.cat(squares)
        return total + self._bias_squares(g) if wanted[1] else total

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
        biases = upcast(g).flatten(2).sum(2) if wanted[1] else None
        weights, bias, start, terms = None, None, 0, self._terms(saved)
        for x, gradient in self._chunks(saved, g):
            rows = _materialize(x, gradient)
            square = self._squares(terms, rows, wanted)
            here = slice(start, start := start + rows.shape[0])
            factors = clip(square if biases is None else square + biases[here].square().sum(1))
            part = weigh_rows(factors, rows)
            weights = part if weights is None else weights.add_(part)
            if biases is not None:
                part = weigh_rows(factors, biases[here])
                bias = part if bias is None else bias.add_(part)
        return self._finish(saved, weights, bias, wanted)

    def per_example_gradients(self, saved: Saved, g: Tensor, wanted: Wanted) -> Gradients:
        bias = upcast(g).flatten(2).sum(2) if wanted[1] else None
        if not self._wants_weights(wanted):
            return None, bias
        rows = torch.cat([_materialize(x, gradient) for x, gradient in self._chunks(saved, g)])
        each = [self._finish(saved, row, None, wanted) for row in rows]
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

    def _bias_squares(self, g: Tensor) -> Tensor:
        return upcast(g).flatten(2).sum(2).square().sum(1)

    def _by_gram(self, x: Tensor, gradient: Tensor) -> bool:
        """x (n, groups, T, K), gradient (n, groups, p/groups, T): whether two T×T Gram matrices are cheaper."""
        groups, t, k = x.shape[1:]
        p = gradient.shape[2]
        if groups > 1 or self.formula == "materialize":
            return False
        return self.formula == "gram" or t * (p + k) < p * k

    def _flatten(self, weight: Tensor) -> Tensor:
        """(p, c/groups, *k) -> (p, K) in the order of the unfolded inputs: channels fastest."""
        return weight.movedim(1, -1).flatten(1)

    def _unflatten(self, rows: Tensor) -> Tensor:
        m = self.module
        return rows.view(-1, *m.kernel_size, m.in_channels // m.groups).movedim(-1, 1).contiguous()

    def _chunks(self, saved: Saved, g: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """A few examples at a time: unfolded inputs (n, groups, T, K), output gradients (n, groups, p/groups, T)."""
        x, groups = saved[0], self.module.groups
        assert x is not None
        t, k = math.prod(g.shape[2:]), math.prod(self.module.kernel_size)
        largest = max(t * k * x.shape[1], k * (x.shape[1] // groups) * g.shape[1])
        n = max(1, CHUNK_FLOATS // largest)
        for start in range(0, x.shape[0], n):
            part, gradient = upcast(x[start : start + n]), upcast(g[start : start + n])
            yield self._unfold(part, gradient.shape[2:]), gradient.reshape(len(part), groups, -1, t)

    def _unfold(self, x: Tensor, out: torch.Size) -> Tensor:
        """Inputs (n, c, *space) -> (n, groups, T, K), channels fastest, through one strided copy."""
        m, padding = self.module, self._padding()
        n, c, space = x.shape[0], x.shape[1], x.shape[2:]
        padded = x.new_zeros(n, *(size + 2 * pad for size, pad in zip(space, padding, strict=True)), c)
        inner = tuple(slice(pad, pad + size) for size, pad in zip(space, padding, strict=True))
        padded[(slice(None), *inner)] = x.movedim(1, -1)
        steps = padded.stride()[1:-1]
        strides = (
            padded.stride(0),
            *(a * b for a, b in zip(steps, m.stride, strict=True)),
            *(a * b for a, b in zip(steps, m.dilation, strict=True)),
            1,
        )
        windows = padded.as_strided((n, *out, *m.kernel_size, c), strides)
        columns = windows.reshape(n, math.prod(out), -1, m.groups, c // m.groups)
        return columns.permute(0, 3, 1, 2, 4).flatten(3)


def _materialize(x: Tensor, gradient: Tensor) -> Tensor:
    """(n, groups, T, K), (n, groups, p/groups, T) -> weight gradients (n, p, K)."""
    return (gradient @ x).flatten(1, 2)


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
