"""Clips layers whose weight gradient is a sum of outer products over positions, from the product's two sides alone.

One example's weight gradient is GᵀX for inputs X (T, d) and output gradients G (T, p), T positions. There are two ways
to its norm, and `cost_model.py` says which is cheaper:

| way | how | operations | memory |
|---|---|---|---|
| gram | ‖GᵀX‖² = Σ (XXᵀ)∘(GGᵀ) | T²(p + d) | T² |
| materialize | form GᵀX, a few examples at a time | T·p·d | p·d |

Gradients that were formed are used again where that saves a product: in a group of its own a layer weighs and adds them
up at once; elsewhere they are kept until the group's factors are known, if they are smaller than X and G. Otherwise the
clipped sum is one more product over the whole batch, and norms are raised by what the two may round apart.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterator
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from groupwise.clipping.cost_model import Work, gram_terms
from groupwise.clipping.factors import add_weighed_rows, gone_rows, starts_kernels, weigh_rows, without_rows
from groupwise.clipping.norm_terms import FEW, RowTerms, Terms, squares_together
from groupwise.clipping.precision import (
    LONGEST_SUM,
    batched_product,
    cut_factors,
    floor,
    keeps_half,
    product_over_rows,
    raised,
    second_product_slack,
    squared_row_norms,
    upcast,
)
from groupwise.clipping.rules.base import (
    Clip,
    Finish,
    Gradients,
    LayerRule,
    RuleContext,
    Saved,
    Wanted,
    chunk_floats,
    numbers,
)

THIN = 1 << 18
"""Weights of so few numbers (low-rank adapters) are formed the faster way round, and turned when they are done."""


class MatrixRule(LayerRule):
    """A layer with weight gradients GᵀX and, perhaps, a bias with gradients Σ_t G_t.

    A layer says `rows`, its forward and its input gradient. One that does not have X at hand (a convolution would have
    to unfold its input) gives in `rows` what X and G are read from, and says the steps below for itself.
    `saved` begins with (input, weight); the steps get what `rows` gave in the input's and the output gradient's places.
    """

    parameter_names: ClassVar[tuple[str, ...]] = ("weight", "bias")
    transposed: ClassVar[bool] = False
    """The weight is stored as (d, p)."""

    @abstractmethod
    def rows(self, saved: Saved, g: Tensor) -> tuple[Tensor, Tensor]:
        """X (B, T, d) and G (B, T, p), float32 or better; or both bfloat16, where products take that (`keeps_half`)."""

    # -- what the engine asks for ---------------------------------------------------------------------------------

    def squared_norms(self, saved: Saved, g: Tensor, wanted: Wanted, context: RuleContext) -> Tensor:
        return squares_together([[self.norm_terms(saved, g, wanted, context)]])[0]

    def norm_terms(self, saved: Saved, g: Tensor, wanted: Wanted, context: RuleContext) -> Terms | Tensor:
        saved, g = self._as_rows(saved, g)
        if not self.uses_weight(wanted):
            return squared_row_norms(self.bias_gradients(saved, g))
        way = self.way(saved, g, context)
        if way == "gram":
            terms = self.gram_squares(saved, g, wanted, context)
            if self.positions(g) <= LONGEST_SUM:  # up to there its own slack is enough for the sum's too
                return terms
            return raised(squares_together([[terms]])[0], self.slack(saved, g))
        if way == "product":
            return _one_position(upcast(saved[0]), upcast(g), wanted[1])  # type: ignore[arg-type]
        measure = self.measure(saved, wanted)
        chunks = self.gradient_chunks(saved, g, way, context)
        squares = raised(torch.cat([measure(gradients) for gradients in chunks]), self.slack(saved, g))
        return squares + squared_row_norms(self.bias_gradients(saved, g)) if wanted[1] else squares

    def weighted_sum(
        self, saved: Saved, g: Tensor, factors: Tensor | None, wanted: Wanted, context: RuleContext
    ) -> Gradients:
        x, g = self.rows(saved, g)
        dtype = torch.promote_types(g.dtype, torch.float32)
        weights, gone = None if factors is None else factors.to(dtype), gone_rows(factors)
        weight = bias = None
        if wanted[1]:  # over positions first: as the norms have it, and long sums of products round more
            sums = without_rows(g.sum(1, dtype=dtype), gone)
            bias = sums.sum(0) if weights is None else weights @ sums
            del sums  # the product below needs the memory
        if self.uses_weight(wanted):
            if weights is not None and keeps_half(x, g):
                weights = cut_factors(weights)
            if weights is None:
                x, g = without_rows(x, gone), without_rows(g, gone)
            elif x.shape[2] <= g.shape[2]:  # the smaller of the two is scaled
                x, g = _scaled(x, weights, gone, context), without_rows(g, gone)
            else:
                x, g = without_rows(x, gone), _scaled(g, weights, gone, context)
            left, right = self._sides(x.flatten(0, 1), g.flatten(0, 1))
            weight = product_over_rows(left, right)
        return self.finish(saved, weight, bias, wanted)

    def defers(self, saved: Saved, g: Tensor, wanted: Wanted, context: RuleContext) -> bool:
        if not super().defers(saved, g, wanted, context):
            return False
        rows = self._as_rows(saved, g)
        if not (self.uses_weight(wanted) and self.way(*rows, context).startswith("materialize")):
            return True
        return self._are_small(*rows)

    def clipped_sum(self, saved: Saved, g: Tensor, clip: Clip, wanted: Wanted, context: RuleContext) -> Gradients:
        rows = self._as_rows(saved, g)
        way = self.way(*rows, context) if self.uses_weight(wanted) else ""
        if not way.startswith("materialize"):
            return super().clipped_sum(saved, g, clip, wanted, context)
        measure, start, factors, weight = self.measure(rows[0], wanted), 0, list[Tensor](), None
        biases = self.bias_gradients(*rows) if wanted[1] else None
        bias_squares = None if biases is None else squared_row_norms(biases)
        for gradients in self.gradient_chunks(*rows, way, context):
            squares, here = measure(gradients), slice(start, start := start + len(gradients))
            factors.append(clip(squares if bias_squares is None else squares + bias_squares[here]))
            weight = add_weighed_rows(weight, factors[-1], gradients)
        bias = None if biases is None else weigh_rows(torch.cat(factors), biases)
        return self.finish(saved, weight, bias, wanted)

    def book_keep(self, saved: Saved, g: Tensor, wanted: Wanted, context: RuleContext) -> tuple[Terms | Tensor, Finish]:
        rows = self._as_rows(saved, g)
        way, shape = self.way(*rows, context) if self.uses_weight(wanted) else "", self.gradient_shape(*rows)
        if not way.startswith("materialize") or len(g) * shape[0] * shape[1] > numbers(saved[0], g):
            return super().book_keep(saved, g, wanted, context)
        if starts_kernels(g) and self._are_small(*rows):
            (weights,) = self.gradient_chunks(*rows, way, context, upcast(rows[1][:0]).new_empty(len(g), *shape))
            weights = weights if self._inputs_first(*self._sizes(*rows)) == self.transposed else weights.mT
            terms = RowTerms((weights, self.bias_gradients(*rows) if wanted[1] else None))
            return terms, terms
        kept, measure = upcast(rows[1][:0]).new_empty(len(g), *shape), self.measure(rows[0], wanted)
        squares = torch.cat([measure(gradients) for gradients in self.gradient_chunks(*rows, way, context, kept)])
        biases = self.bias_gradients(*rows) if wanted[1] else None
        if biases is not None:
            squares = squares + squared_row_norms(biases)
        return squares, partial(self._weigh_kept, (None, None, *saved[2:]), kept, biases, wanted=wanted)

    def book_keep_all(
        self, saved: Saved, g: Tensor, wanted: Wanted, context: RuleContext
    ) -> list[tuple[Terms | Tensor, Finish]]:
        if not (self.uses_weight(wanted) and wanted[1] and starts_kernels(g)):
            return super().book_keep_all(saved, g, wanted, context)
        rows = RowTerms((None, self.bias_gradients(*self._as_rows(saved, g)), *[None] * (len(wanted) - 2)))
        weight = self.book_keep(saved, g, (wanted[0], False, *wanted[2:]), context)
        return [weight, (rows, rows)] if rows.few else super().book_keep_all(saved, g, wanted, context)

    def per_example_gradients(self, saved: Saved, g: Tensor, wanted: Wanted) -> Gradients:
        x, g = map(upcast, self.rows(saved, g))
        weight = (x.mT @ g if self.transposed else g.mT @ x) if wanted[0] else None
        return weight, g.sum(1) if wanted[1] else None

    # -- steps ----------------------------------------------------------------------------------------------------

    def uses_weight(self, wanted: Wanted) -> bool:
        """Whether the weight's gradient counts."""
        return wanted[0]

    def bias_gradients(self, saved: Saved, g: Tensor) -> Tensor:
        """The bias's gradients (B, p)."""
        return g.sum(1, dtype=torch.promote_types(g.dtype, torch.float32))

    def way(self, saved: Saved, g: Tensor, context: RuleContext) -> str:
        """How norms are found: "gram", "materialize…", or "product" where there is one position and nothing to form."""
        x = saved[0]
        assert x is not None
        return "product" if x.shape[1] == 1 else self.choose(saved, g, context)

    def choose(self, saved: Saved, g: Tensor, context: RuleContext) -> str:
        """The cheapest of `ways`, decided once for each size."""
        x = saved[0]
        assert x is not None
        key = (x.shape, g.shape, context.own_group)
        return context.choices.choose(key, x.device, partial(self.ways, x.shape, g.shape, context.own_group))

    def ways(self, inputs: torch.Size, out: torch.Size, own_group: bool) -> dict[str, Work]:
        """What each way costs, the clipped sum included, for what `rows` gives in these sizes."""
        (b, t, d), p = inputs, out[2]
        product, scaling, gradients = 2.0 * b * t * d * p, 8.0 * b * t * min(d, p), 4.0 * b * d * p
        again = not own_group and b * d * p > b * t * (d + p)  # what is fused, or kept, needs no second product
        return {
            "gram": Work(matmul=product, gram=2.0 * b * t * t * (p + d), bytes=scaling + 24.0 * b * t * t),
            "materialize": Work(outer=product, matmul=product, bytes=2 * gradients + scaling)
            if again
            else Work(outer=product, bytes=3 * gradients),
        }

    def gram_squares(self, saved: Saved, g: Tensor, wanted: Wanted, context: RuleContext) -> Terms | Tensor:
        """Squared norms (B,), of the bias too, from inner products; the bias adds 1 to every entry of XXᵀ."""
        x = saved[0]
        assert x is not None
        return gram_terms(x, g, wanted[1], context.products)

    def gradient_shape(self, saved: Saved, g: Tensor) -> tuple[int, int]:
        """One example's weight gradient as it is formed."""
        d, p = self._sizes(saved, g)
        return (d, p) if self._inputs_first(d, p) else (p, d)

    def gradient_chunks(
        self, saved: Saved, g: Tensor, way: str, context: RuleContext, kept: Tensor | None = None
    ) -> Iterator[Tensor]:
        """Weight gradients (n, *gradient_shape) of a few examples at a time: all into `kept`, or each over the last."""
        x, (height, width) = saved[0], self.gradient_shape(saved, g)
        assert x is not None
        step = min(len(g), max(1, chunk_floats(g) // (height * width)))
        chunks = chunk_memory(context, upcast(g[:0]), step, (height, width), kept)
        left, right = self._sides(x, g)
        for a, b in zip(left.split(step), right.split(step), strict=True):
            yield batched_product(a.mT, b, out=next(chunks)[: len(a)])

    def measure(self, saved: Saved, wanted: Wanted) -> Callable[[Tensor], Tensor]:
        """From gradients as they are formed, (n, *gradient_shape), to squared norms (n,) without the bias."""
        return squared_row_norms

    def slack(self, saved: Saved, g: Tensor) -> Tensor:
        """What norms (B,) are raised by where the sum is not made from the gradients that were measured."""
        x = saved[0]
        assert x is not None
        return second_product_slack(x, g, self.positions(g))

    def positions(self, g: Tensor) -> int:
        """T, the outer products that an example's gradient is the sum of."""
        return g.shape[1]

    def finish(self, saved: Saved, weight: Tensor | None, bias: Tensor | None, wanted: Wanted) -> Gradients:
        """From a summed weight gradient, of `gradient_shape`, to the gradients of the parameters as they are stored."""
        if weight is None:
            return None, bias
        rows, columns = self.module._parameters["weight"].shape  # type: ignore[union-attr]
        d, p = (rows, columns) if self.transposed else (columns, rows)
        return weight if self._inputs_first(d, p) == self.transposed else weight.t(), bias

    def _sizes(self, saved: Saved, g: Tensor) -> tuple[int, int]:
        """d and p."""
        x = saved[0]
        assert x is not None
        return x.shape[2], g.shape[2]

    def _are_small(self, saved: Saved, g: Tensor) -> bool:
        """Whether all examples' gradients (p, d) are few numbers, of the parameters themselves."""
        kind = type(self)
        if kind.measure is not MatrixRule.measure or kind.finish is not MatrixRule.finish:
            return False
        height, width = self.gradient_shape(saved, g)
        return len(g) * height * width <= FEW

    def _as_rows(self, saved: Saved, g: Tensor) -> tuple[Saved, Tensor]:
        x, g = self.rows(saved, g)
        return (x, *saved[1:]), g

    def _weigh_kept(
        self, saved: Saved, kept: Tensor, biases: Tensor | None, factors: Tensor, wanted: Wanted
    ) -> Gradients:
        bias = None if biases is None else weigh_rows(factors, biases)
        return self.finish(saved, weigh_rows(factors, kept), bias, wanted)

    def _inputs_first(self, d: int, p: int) -> bool:
        """Whether gradients are formed as XᵀG (d, p): as the weight is stored, or the wide way for thin layers."""
        return d <= p if d * p <= THIN else self.transposed

    def _sides(self, x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        return (x, g) if self._inputs_first(x.shape[-1], g.shape[-1]) else (g, x)


def chunk_memory(
    context: RuleContext, like: Tensor, step: int, shape: tuple[int, int], kept: Tensor | None
) -> Iterator[Tensor]:
    """Where chunk after chunk of `step` examples' gradients is written: along `kept` (B, *shape), or in one buffer."""
    if kept is not None:
        yield from kept.split(step)
        return
    buffer = context.buffers.take("gradients", like, step, *shape)
    while True:
        yield buffer


def _one_position(x: Tensor | None, g: Tensor, bias: bool) -> Tensor:
    """‖g xᵀ‖² = ‖x‖²‖g‖² for x (B, 1, d) and g (B, 1, p), (B,); the bias adds ‖g‖²."""
    assert x is not None
    left, right = squared_row_norms(x) + floor(x), squared_row_norms(g) + floor(g)
    return (left.add_(1) if bias else left) * right


def _scaled(rows: Tensor, weights: Tensor, gone: Tensor | None, context: RuleContext) -> Tensor:
    """rows_i · weight_i of (B, T, n), and zeros where examples are `gone`."""
    memory = context.buffers.take("scaled", upcast(rows[:0]), *rows.shape)
    scaled = torch.mul(rows, weights.view(-1, 1, 1), out=memory)
    return scaled if gone is None else scaled.masked_fill_(gone.view(-1, 1, 1), 0)
