"""Clips convolutions in one, two and three dimensions, with any stride, padding, dilation and groups."""

import math
from collections.abc import Iterator
from functools import cached_property
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from groupwise.clipping.cost_model import Work, norms_from_products, self_products
from groupwise.clipping.factors import drop_zero_rows, scale_rows
from groupwise.clipping.precision import batched_product, keeps_half, second_product_slack, squared_row_norms, upcast
from groupwise.clipping.rules.base import (
    Gradients,
    RuleContext,
    Saved,
    Wanted,
    chunk_floats,
    in_format_of,
    numbers,
    register_rule,
)
from groupwise.clipping.rules.geometry import Geometry, Span
from groupwise.clipping.rules.matrix import MatrixRule, chunk_memory

LEAST_KERNEL_INPUT = 20480
"""On a CPU torch gives one example of fewer numbers to a convolution kernel that is slower than unfolding."""

TAP_LOSS = 0.6
"""Products tap by tap write parts of rows: 1.3 to 2 times the time of the whole products that rates are measured on."""

_CONV = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}


class ConvRule(MatrixRule):
    """Convolutions: weight (p, c/groups, *k), bias (p,). `saved` begins with (x, weight used)."""

    module: Any  # one of the convolution classes: they share these attributes

    @classmethod
    def handles(cls, module: nn.Module) -> bool:
        own, usual = (getattr(kind, "_conv_forward", None) for kind in (type(module), cls.layer_type))
        return super().handles(module) and own is usual

    def has_batch(self, axes: int) -> bool:
        return axes == len(self.module.kernel_size) + 2

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

    def rows(self, saved: Saved, g: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs (B, c, *space) and output gradients (B, p, *out), for X and G: both bfloat16, or float32 at least."""
        x = saved[0]
        assert x is not None
        return (x, g) if keeps_half(x, g) else (upcast(x), upcast(g))

    def weighted_sum(
        self, saved: Saved, g: Tensor, factors: Tensor | None, wanted: Wanted, context: RuleContext
    ) -> Gradients:
        x, g = map(upcast, self.rows(saved, g))
        weight = saved[1]
        assert weight is not None
        mask = [False, self.uses_weight(wanted), wanted[1]]
        rows = (scale_rows(g, factors), drop_zero_rows(factors, x), upcast(weight))
        _, weights, bias = self._convolve_backward(*rows, mask)
        return self.finish(saved, self._flatten(weights) if mask[1] else None, bias if mask[2] else None, wanted)

    def per_example_gradients(self, saved: Saved, g: Tensor, wanted: Wanted) -> Gradients:
        saved, g = self._as_rows(saved, g)
        bias = self.bias_gradients(saved, g) if wanted[1] else None
        if not self.uses_weight(wanted):
            return None, bias
        kept = upcast(g[:0]).new_empty(len(g), *self.gradient_shape(saved, g))
        chunks = self.gradient_chunks(saved, g, "materialize", RuleContext(), kept)
        each = [self.finish(saved, row, None, wanted) for rows in chunks for row in rows]
        parts = [[part for part in column if part is not None] for column in zip(*each, strict=True)]
        stacked = [torch.stack(part) if part else None for part in parts]
        return stacked[0], bias, *stacked[2:]

    # -- steps of `MatrixRule` ------------------------------------------------------------------------------------

    def bias_gradients(self, saved: Saved, g: Tensor) -> Tensor:
        """The bias's gradients (B, p), from output gradients (B, p, *out)."""
        return g.flatten(2).sum(2, dtype=torch.promote_types(g.dtype, torch.float32))

    def way(self, saved: Saved, g: Tensor, context: RuleContext) -> str:
        """How norms are found for an output like g: "gram", "materialize" or "materialize/kernel"."""
        return self.choose(saved, g, context)

    def ways(self, inputs: torch.Size, out: torch.Size, own_group: bool) -> dict[str, Work]:
        """What the ways cost, the weighted sum included."""
        b, p, t, k = out[0], out[1], math.prod(out[2:]), self._filter_size()
        product, scaling, gradients = 2.0 * b * p * t * k, 8.0 * b * p * t, 4.0 * b * p * k
        again = not own_group and p * k * b > b * p * t + math.prod(inputs)  # kept gradients need no second product
        later = {"matmul": product, "bytes": 2 * gradients + scaling} if again else {"bytes": 3 * gradients}
        kernel = later | {"bytes": later["bytes"] + 3 * gradients}
        if self.module.groups > 1:
            return {"materialize": Work(kernel=product, **kernel)}
        unfolds, rows, spans = self._geometry.layout(inputs[1], inputs[2:], out[2:])
        width = math.prod(unfolds.kernel) * inputs[1]
        outer = 2.0 * b * p * width * sum(map(len, spans))  # what padding adds is left out
        lost = TAP_LOSS * outer if len(spans) > 1 else 0.0
        unfolding = later | {"bytes": later["bytes"] + 8.0 * b * math.prod(rows) * width}
        ways = {"materialize": Work(outer=outer, lost=lost, **unfolding)}
        if math.prod(self.module.kernel_size) > 1 and math.prod(inputs[1:]) > LEAST_KERNEL_INPUT:
            ways["materialize/kernel"] = Work(kernel=product, calls=b, **kernel)
        _, operations, written = self._geometry.products_work(inputs[1], inputs[2:], out[2:])
        moved = scaling + 4.0 * b * (written + 6.0 * t * t)
        return ways | {"gram": Work(matmul=product, gram=b * (operations + 2.0 * t * t * p), bytes=moved)}

    def gram_squares(self, saved: Saved, g: Tensor, wanted: Wanted, context: RuleContext) -> Tensor:
        """Squared norms (B,) from XXᵀ and GGᵀ of a few examples at a time, and the bias's."""
        step = max(1, chunk_floats(g) // self._product_numbers(saved, g))
        parts = (self.examples(saved, g, slice(start, start + step)) for start in range(0, len(g), step))
        total = torch.cat([self._squares_from_products(*part, wanted, context) for part in parts])
        return total + squared_row_norms(self.bias_gradients(saved, g)) if wanted[1] else total

    def gradient_shape(self, saved: Saved, g: Tensor) -> tuple[int, int]:
        """(p, K), weights in the order of the unfolded inputs: channels fastest."""
        return g.shape[1], self._filter_size()

    def gradient_chunks(
        self, saved: Saved, g: Tensor, way: str, context: RuleContext, kept: Tensor | None = None
    ) -> Iterator[Tensor]:
        """Gradients (n, p, K) of the weight used, of a few examples at a time."""
        x, shape = saved[0], self.gradient_shape(saved, g)
        assert x is not None
        step = max(1, min(len(g), chunk_floats(g) // math.prod(shape)))
        grouped = self.module.groups > 1
        if grouped and (self._channels() == 1 or self._geometry.out(x.shape[2:]) == list(g.shape[2:])):
            return self._by_groups(x, g, step, kept)
        if grouped or way.endswith("kernel"):
            alone = step == 1 and kept is None
            chunks = None if alone else chunk_memory(context, upcast(g[:0]), step, shape, kept)
            return self._by_kernel(saved, g, chunks)
        unfolds, rows, spans = self._geometry.layout(x.shape[1], x.shape[2:], g.shape[2:])
        unfolded = math.prod((*rows, *unfolds.kernel)) * x.shape[1]
        part = max(1, min(step, chunk_floats(g) // max(unfolded, numbers(x[0]))))
        step = step if step == len(g) else step // part * part  # a part lies in one chunk
        columns = unfolds.unfolded(x, rows, part, context.buffers)
        parts = positions_last(g).split(part)
        memory = chunk_memory(context, upcast(g[:0]), step, shape, kept)
        return _products(zip(columns, parts, strict=True), spans, memory)

    def slack(self, saved: Saved, g: Tensor) -> Tensor:
        """What norms (B,) are raised by where sums are not made from the gradients that were measured."""
        x = saved[0]
        assert x is not None
        taps = math.prod(self.module.kernel_size)  # at most so many positions see one number of the input
        return taps**0.5 * second_product_slack(x, g, self.positions(g))

    def positions(self, g: Tensor) -> int:
        """T, the places of an output."""
        return math.prod(g.shape[2:])

    def finish(self, saved: Saved, weight: Tensor | None, bias: Tensor | None, wanted: Wanted) -> Gradients:
        """From the summed gradient (p, K) of the weight used to the gradients of the parameters."""
        return None if weight is None else self._unflatten(weight), bias

    # -- the geometry ---------------------------------------------------------------------------------------------

    def _squares_from_products(self, saved: Saved, g: Tensor, wanted: Wanted, context: RuleContext) -> Tensor:
        """Squared norms (B,) of the weight's gradients."""
        rows = positions_first(g)
        longest = max(rows.shape[1], self._filter_size(), rows.shape[2])
        return norms_from_products(self._products(saved, g, context), self_products(rows), False, longest)

    def _product_numbers(self, saved: Saved, g: Tensor) -> int:
        """Numbers that XXᵀ, GGᵀ and what leads to them take for one example."""
        x = saved[0]
        assert x is not None
        written = self._geometry.products_work(x.shape[1], x.shape[2:], g.shape[2:])[2]
        return int(written) + 3 * math.prod(g.shape[2:]) ** 2

    def _products(self, saved: Saved, g: Tensor, context: RuleContext) -> Tensor:
        """XXᵀ (B, T, T)."""
        x = saved[0]
        assert x is not None
        return self._geometry.products(x, g.shape[2:], context.buffers)

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

    def _by_groups(self, x: Tensor, g: Tensor, step: int, kept: Tensor | None) -> Iterator[Tensor]:
        """Gradients of `step` examples at a time, whose groups of channels are groups of one call of a kernel.

        Where a filter sees one channel, gradients are a convolution of the input with the output's gradient, whose
        kernel is faster than that of weights' gradients, and much faster for filters of five and more.
        """
        shape, channels = self._geometry, self._channels()
        if not (x.is_contiguous() and g.is_contiguous()):  # they are copied
            step = max(1, min(step, chunk_floats(g) // numbers(x[0], g[0])))
        chunks = None if kept is None else kept.split(step)
        for place, (xs, gs) in enumerate(zip(x.split(step), g.split(step), strict=True)):
            rows, columns = (upcast(t).reshape(1, -1, *t.shape[2:]) for t in (gs, xs))
            if channels == 1:
                convolve, taps = _CONV[x.dim() - 2], (shape.dilation, shape.padding, shape.stride)
                weights = convolve(columns, rows.movedim(0, 1), None, *taps, columns.shape[1])[0]  # type: ignore[operator]
                weights = weights[(slice(None), *map(slice, shape.kernel))].unsqueeze(1)
            else:
                like = rows.new_empty(1).expand(rows.shape[1], channels, *shape.kernel)
                groups, mask = shape.groups * len(xs), [False, True, False]
                rest = (shape.stride, shape.padding, shape.dilation, False, [0] * (x.dim() - 2), groups, mask)
                weights = torch.ops.aten.convolution_backward(rows, columns, like, None, *rest)[1]
            formed = self._flatten(weights).view(len(xs), -1, self._filter_size())
            yield formed if chunks is None else chunks[place].copy_(formed)

    def _by_kernel(self, saved: Saved, g: Tensor, chunks: Iterator[Tensor] | None) -> Iterator[Tensor]:
        """Gradients collected in memory for some, or, where there is none, one at a time as the kernel writes them."""
        x, weight = saved[:2]
        assert x is not None and weight is not None
        weight, mask = upcast(weight), [False, True, False]
        rows = (
            self._flatten(self._convolve_backward(upcast(one_g), upcast(one_x), weight, mask)[1]).unsqueeze(0)
            for one_g, one_x in zip(g.split(1), x.split(1), strict=True)
        )
        if chunks is None:
            yield from rows
            return
        left = len(g)
        while left:
            chunk = next(chunks)[:left]
            for place in chunk.split(1):
                place.copy_(next(rows))
            left -= len(chunk)
            yield chunk


def _products(sides: Iterator[tuple[Tensor, Tensor]], spans: list[Span], chunks: Iterator[Tensor]) -> Iterator[Tensor]:
    """Gradients (n, p, K) of a few examples at a time, from what was unfolded (n, T, K/k) and from G (n, p, T)."""
    chunk, filled = next(chunks), 0
    for columns, gradients in sides:
        if filled == len(chunk):
            yield chunk
            chunk, filled = next(chunks), 0
        here = chunk[filled : (filled := filled + len(columns))].unflatten(2, (len(spans), -1))
        for tap, span in enumerate(spans):
            if span:
                seen = columns[:, span.seen : span.seen + len(span)]
                batched_product(gradients[:, :, span.first : span.last], seen, out=here[:, :, tap])
            else:
                here[:, :, tap].zero_()
    yield chunk[:filled]


def positions_last(g: Tensor) -> Tensor:
    """Output gradients (B, p, *out) -> (B, p, T), without a copy where the memory has channels last."""
    if g.dim() == 4 and g.is_contiguous(memory_format=torch.channels_last):
        return g.permute(0, 2, 3, 1).flatten(1, 2).mT
    return g.flatten(2)


def positions_first(g: Tensor) -> Tensor:
    """Output gradients (B, p, *out) -> (B, T, p)."""
    return positions_last(g).mT


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
