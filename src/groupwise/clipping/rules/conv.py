"""Convolutions in one, two and three dimensions, with any stride, padding, dilation and groups.

One example's weight gradient is GᵀX for unfolded inputs X (T, K), T output positions and K = c·∏k weights a filter.
Where T is small its norm comes from XXᵀ and GGᵀ. Elsewhere the gradients of a few examples at a time are materialised
(by unfolding and a batched product, or by the device's own kernel on one example), measured, weighed and added up at
once, so that memory stays at one chunk and, in a group of its own, a layer computes nothing twice.
"""

import math
from collections.abc import Iterator
from functools import cached_property, partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from groupwise.clipping.costs import Work
from groupwise.clipping.factors import add_weighed_rows, drop_zero_rows, scale_rows, weigh_rows
from groupwise.clipping.products import self_products
from groupwise.clipping.rules.base import (
    Clip,
    Finish,
    Gradients,
    LayerRule,
    Saved,
    Wanted,
    chunk_floats,
    in_format_of,
    numbers,
    register_rule,
    second_product_slack,
    upcast,
)
from groupwise.clipping.rules.gram import norms_from_products
from groupwise.clipping.rules.unfold import Geometry
from groupwise.clipping.squared_norms import squared_row_norms

LEAST_KERNEL_INPUT = 20480
"""On a CPU torch gives one example of fewer numbers to a convolution kernel that is slower than unfolding."""

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

    @cached_property
    def _geometry(self) -> Geometry:
        m = self.module
        unpadded = self._pads_outside() or m.padding == "valid"
        padding = (0,) * len(m.kernel_size) if unpadded else tuple(m.padding)
        return Geometry(tuple(m.kernel_size), tuple(m.stride), padding, tuple(m.dilation), m.groups)

    def _convolve(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        shape = self._geometry
        rest = shape.stride, shape.padding, shape.dilation, shape.groups
        return _CONV[x.dim() - 2](x, weight, bias, *rest)  # type: ignore[operator]

    def _convolve_backward(self, g: Tensor, x: Tensor, weight: Tensor, mask: list[bool]) -> tuple[Tensor, ...]:
        shape, zeros = self._geometry, [0] * (x.dim() - 2)
        rest = (shape.stride, shape.padding, shape.dilation, False, zeros, shape.groups, mask)
        return torch.ops.aten.convolution_backward(g, x, weight, [weight.shape[0]], *rest)

    def forward(self, x: Tensor, *parameters: Tensor | None) -> tuple[Tensor, Saved]:
        weight, bias = parameters
        assert weight is not None
        return self._convolve(x, weight, bias), (x, weight)

    def arrange(self, saved: Saved, g: Tensor) -> Tensor:
        assert saved[0] is not None
        return in_format_of(saved[0], g)

    def input_gradient(self, saved: Saved, g: Tensor) -> Tensor:
        x, weight = saved[:2]
        assert x is not None and weight is not None
        return self._convolve_backward(g, x, weight, [True, False, False])[0]

    def squared_norms(self, saved: Saved, g: Tensor, wanted: Wanted) -> Tensor:
        if not self._wants_weights(wanted):
            return squared_row_norms(bias_rows(g))
        way = self._way(saved, g.shape)
        if way == "gram":
            step = max(1, chunk_floats(g) // self._product_numbers(saved, g))
            parts = (self.examples(saved, g, slice(start, start + step)) for start in range(0, len(g), step))
            total = torch.cat([self._squares_from_products(*part, wanted) for part in parts])
        else:
            terms = self._terms(saved)
            total = torch.cat([self._squares(terms, rows, wanted) for rows in self._materialized(saved, g, way)])
            total += self._slack_of_sums(saved, g)
        return total + squared_row_norms(bias_rows(g)) if wanted[1] else total

    def weighted_sum(self, saved: Saved, g: Tensor, factors: Tensor | None, wanted: Wanted) -> Gradients:
        x, weight = saved[:2]
        assert x is not None and weight is not None
        mask = [False, self._wants_weights(wanted), wanted[1]]
        rows = (scale_rows(upcast(g), factors), drop_zero_rows(factors, upcast(x)), upcast(weight))
        _, weights, bias = self._convolve_backward(*rows, mask)
        return self._finish(saved, self._flatten(weights) if mask[1] else None, bias if mask[2] else None, wanted)

    def clipped_sum(self, saved: Saved, g: Tensor, clip: Clip, wanted: Wanted) -> Gradients:
        way = self._way(saved, g.shape) if self._wants_weights(wanted) else "gram"
        if way == "gram":
            return super().clipped_sum(saved, g, clip, wanted)
        biases = bias_rows(g) if wanted[1] else None
        terms, start, factors, weights = self._terms(saved), 0, [], None
        for rows in self._materialized(saved, g, way):
            square = self._squares(terms, rows, wanted)
            here = slice(start, start := start + len(rows))
            part = clip(square if biases is None else square + squared_row_norms(biases[here]))
            factors.append(part)
            weights = add_weighed_rows(weights, part, rows)
        bias = None if biases is None else weigh_rows(torch.cat(factors), biases)
        return self._finish(saved, weights, bias, wanted)

    def book_keep(self, saved: Saved, g: Tensor, wanted: Wanted) -> tuple[Tensor, Finish]:
        size = g.shape[0] * g.shape[1] * self._filter_size()
        way = self._way(saved, g.shape) if self._wants_weights(wanted) else "gram"
        if way == "gram" or size > numbers(g, saved[0]):
            return super().book_keep(saved, g, wanted)
        kept = upcast(g).new_empty(g.shape[0], g.shape[1], self._filter_size())
        terms, start, squares = self._terms(saved), 0, []
        for rows in self._materialized(saved, g, way):
            squares.append(self._squares(terms, rows, wanted))
            kept[start : (start := start + len(rows))] = rows
        biases = bias_rows(g) if wanted[1] else None
        total = torch.cat(squares)
        return total if biases is None else total + squared_row_norms(biases), partial(
            self._weigh_kept, (None, None, *saved[2:]), kept, biases, wanted=wanted
        )

    def _weigh_kept(
        self, saved: Saved, kept: Tensor, biases: Tensor | None, factors: Tensor, wanted: Wanted
    ) -> Gradients:
        bias = None if biases is None else weigh_rows(factors, biases)
        return self._finish(saved, weigh_rows(factors, kept), bias, wanted)

    def per_example_gradients(self, saved: Saved, g: Tensor, wanted: Wanted) -> Gradients:
        bias = bias_rows(g) if wanted[1] else None
        if not self._wants_weights(wanted):
            return None, bias
        chunks = self._materialized(saved, g, "materialize")
        each = [self._finish(saved, row, None, wanted) for rows in chunks for row in rows.clone()]
        parts = [[part for part in column if part is not None] for column in zip(*each, strict=True)]
        stacked = [torch.stack(part) if part else None for part in parts]
        return stacked[0], bias, *stacked[2:]

    # -- what a convolution with computed weights (ws_conv.py) does otherwise ------------------------------------

    def _wants_weights(self, wanted: Wanted) -> bool:
        return wanted[0]

    def _terms(self, saved: Saved) -> Any:
        """What `_squares` needs besides the gradients."""
        return None

    def _squares(self, terms: Any, rows: Tensor, wanted: Wanted) -> Tensor:
        """Squared norms (n,) from gradients (n, p, K) of the weight used."""
        return squared_row_norms(rows)

    def _slack_of_sums(self, saved: Saved, g: Tensor) -> Tensor:
        """What squared norms (B,) are raised by where sums are not made from the gradients that were measured."""
        x = saved[0]
        assert x is not None
        taps = math.prod(self.module.kernel_size)  # at most so many positions see one number of the input
        return taps * second_product_slack(upcast(x), upcast(g), math.prod(g.shape[2:]))

    def _squares_from_products(self, saved: Saved, g: Tensor, wanted: Wanted) -> Tensor:
        """The same, (B,), from XXᵀ and GGᵀ."""
        rows = positions_first(g)
        longest = max(rows.shape[1], self._filter_size(), rows.shape[2])
        return norms_from_products(self._products(saved, g), self_products(rows), False, longest)

    def _finish(self, saved: Saved, weights: Tensor | None, bias: Tensor | None, wanted: Wanted) -> Gradients:
        """From the summed gradient (p, K) of the weight used to the gradients of the parameters."""
        return None if weights is None else self._unflatten(weights), bias

    # -- gradients of the weight used -----------------------------------------------------------------------------

    def _way(self, saved: Saved, out: torch.Size) -> str:
        """How to find norms for an output like out (B, p, *space): "gram", "materialize" or "materialize/kernel"."""
        x = saved[0]
        assert x is not None
        shape = (tuple(x.shape), tuple(out), self.alone)
        return self.choices.choose(shape, x.device, lambda: self._ways(x.shape, out))

    def _ways(self, inputs: torch.Size, out: torch.Size) -> dict[str, Work]:
        """What the ways cost, the weighted sum included."""
        b, p, t, k, groups = out[0], out[1], math.prod(out[2:]), self._filter_size(), self.module.groups
        product, scaling, gradients = 2.0 * b * p * t * k, 8.0 * b * p * t, 4.0 * b * p * k
        again = not self.alone and p * k * b > b * p * t + math.prod(inputs)  # kept gradients need no second product
        later = {"matmul": product, "bytes": 2 * gradients + scaling} if again else {"bytes": 3 * gradients}
        unfolding = later | {"bytes": later["bytes"] + 8.0 * b * t * k * groups}
        kernel = later | {"bytes": later["bytes"] + 3 * gradients}
        ways = {"materialize": Work(outer=product, **unfolding)}
        if math.prod(self.module.kernel_size) > 1 and math.prod(inputs[1:]) > LEAST_KERNEL_INPUT:
            ways["materialize/kernel"] = Work(kernel=product, calls=b, **kernel)
        if groups > 1:
            return ways
        _, operations, written = self._geometry.products_work(inputs[1], inputs[2:], out[2:])
        moved = scaling + 4.0 * b * (written + 6.0 * t * t)
        return ways | {"gram": Work(matmul=product, gram=b * (operations + 2.0 * t * t * p), bytes=moved)}

    def _product_numbers(self, saved: Saved, g: Tensor) -> int:
        """Numbers that XXᵀ, GGᵀ and what leads to them take for one example."""
        x = saved[0]
        assert x is not None
        written = self._geometry.products_work(x.shape[1], x.shape[2:], g.shape[2:])[2]
        return int(written) + 3 * math.prod(g.shape[2:]) ** 2

    def _products(self, saved: Saved, g: Tensor) -> Tensor:
        """XXᵀ (B, T, T)."""
        x = saved[0]
        assert x is not None
        return self._geometry.products(upcast(x), g.shape[2:], self.shared.rooms)

    def _filter_size(self) -> int:
        """K, the weights of one filter."""
        return math.prod(self.module.kernel_size) * self._channels()

    def _channels(self) -> int:
        """Channels of the input that one filter sees."""
        return self.module.in_channels // self.module.groups

    def _flatten(self, weight: Tensor) -> Tensor:
        """(p, c/groups, *k) -> (p, K) in the order of the unfolded inputs: channels fastest."""
        return weight.movedim(1, -1).flatten(1)

    def _unflatten(self, rows: Tensor) -> Tensor:
        return rows.view(-1, *self.module.kernel_size, self._channels()).movedim(-1, 1)

    def _materialized(self, saved: Saved, g: Tensor, way: str) -> Iterator[Tensor]:
        """Gradients (n, p, K) of a few examples at a time, in a buffer that the next ones overwrite."""
        p, k = g.shape[1], self._filter_size()
        step = max(1, min(len(g), chunk_floats(g) // (p * k)))
        one_by_one = way.endswith("kernel")
        return self._by_kernel(saved, upcast(g), step) if one_by_one else self._by_unfolding(saved, upcast(g), step)

    def _by_unfolding(self, saved: Saved, g: Tensor, most: int) -> Iterator[Tensor]:
        shape, x = self._geometry, saved[0]
        assert x is not None
        p, k, groups, t = g.shape[1], self._filter_size(), shape.groups, math.prod(g.shape[2:])
        step = max(1, min(most, chunk_floats(g) // max(t * k * groups, numbers(x[0]))))
        buffer, filled = self.shared.rooms.take("gradients", g, most * groups, p // groups, k), 0
        parts = positions_last(g, groups).split(step * groups)
        for columns, gradients in zip(
            shape.unfolded(upcast(x), g.shape[2:], step, self.shared.rooms), parts, strict=True
        ):
            if filled + len(columns) > len(buffer):
                yield buffer[:filled].view(-1, p, k)
                filled = 0
            torch.bmm(gradients, columns, out=buffer[filled : filled + len(columns)])
            filled += len(columns)
        yield buffer[:filled].view(-1, p, k)

    def _by_kernel(self, saved: Saved, g: Tensor, most: int) -> Iterator[Tensor]:
        x, weight = saved[:2]
        assert x is not None and weight is not None
        x, weight, mask = upcast(x), upcast(weight), [False, True, False]
        buffer = self.shared.rooms.take("gradients", g, most, g.shape[1], self._filter_size())
        for some_g, some_x in zip(g.split(most), x.split(most), strict=True):
            for i in range(len(some_g)):
                row = self._convolve_backward(some_g[i : i + 1], some_x[i : i + 1], weight, mask)[1]
                buffer[i] = self._flatten(row)
            yield buffer[: len(some_g)]


def bias_rows(g: Tensor) -> Tensor:
    """Per-example gradients (B, p) of the bias, from output gradients (B, p, *out)."""
    return upcast(g).flatten(2).sum(2)


def positions_last(g: Tensor, groups: int) -> Tensor:
    """Output gradients (B, p, *out) -> (B·groups, p/groups, T), without a copy where the memory has channels last."""
    if groups == 1 and g.dim() == 4 and g.is_contiguous(memory_format=torch.channels_last):
        return g.permute(0, 2, 3, 1).flatten(1, 2).mT
    return g.reshape(g.shape[0] * groups, g.shape[1] // groups, -1)


def positions_first(g: Tensor) -> Tensor:
    """Output gradients (B, p, *out) -> (B, T, p)."""
    return positions_last(upcast(g), 1).mT


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
