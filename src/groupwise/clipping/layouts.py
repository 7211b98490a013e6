"""Tells which axis of a layer's input counts examples, and brings saved tensors and gradients to examples first."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum

import torch
from torch import Tensor

from groupwise.errors import UserError


@dataclass(frozen=True)
class BatchAxis:
    """Where a tensor's examples are: on `axis`, `each` rows in a row for every example."""

    axis: int = 0
    each: int = 1

    def moved(self, by: int) -> "BatchAxis":
        """The same with that many axes in front."""
        return BatchAxis(self.axis + by, self.each) if by else self


class Order(Enum):
    """How a layer's input holds the batch."""

    FIRST = "first axis"
    SECOND = "second axis"
    """Sequences first: (T, B, ...)."""
    FOLDED = "first axis, each example's rows together"
    """(B·k, ...): windows of an image, choices of a question, frames of a film."""
    STACKED = "first axis, one row of every example after the other"
    """(k·B, ...): the two halves of a pair after `torch.cat`."""
    NONE = "no axis"
    """The same for every example: positions, learned queries."""


@dataclass(frozen=True)
class Layout:
    """The order of a call's rows, and k, how many of them belong to each example."""

    order: Order
    each: int = 1

    def examples_first(self, t: Tensor) -> Tensor:
        """(…) -> (B, …) for FIRST and SECOND, (B, k, …) for the two with k rows an example."""
        if self.order is Order.SECOND:
            return t.movedim(1, 0)
        if self.order is Order.FOLDED:
            return t.unflatten(0, (-1, self.each))
        if self.order is Order.STACKED:
            return t.unflatten(0, (self.each, -1)).movedim(1, 0)
        return t

    def rows_of(self, rows: int, examples: slice) -> Tensor:
        """Numbers of the rows (of B·k) that belong to some of the examples, in such an order that the layout still
        holds for them."""
        chosen = self.examples_first(torch.arange(rows))[examples]
        return (chosen.mT if self.order is Order.STACKED else chosen).flatten()


FIRST, NONE = Layout(Order.FIRST), Layout(Order.NONE)


@dataclass
class _Seen:
    """What the calls of one layer, on inputs with so many axes, have shown."""

    fits: set[Order] = field(default_factory=lambda: set(Order))
    """The orders that fit all sizes of batches so far."""
    lengths: dict[int, int] = field(default_factory=dict)
    """Size of a batch -> length of the input's first axis."""
    used: set[Order] = field(default_factory=set)
    """The orders by which gradients were told apart."""
    proven: Order | None = None
    """FOLDED or STACKED, as the gradients of the losses have shown."""


class Layouts:
    """What is known of the layers' inputs.

    One shape may fit several orders (a sequence as long as the batch). A first call takes the likeliest, and each
    batch of another size rules out what does not fit it. Where that rules out an order that gradients were told apart
    by, they may have gone to the wrong examples, and it is an error. `verify` shows batches of several sizes before
    training, so that training begins with what is known.
    """

    def __init__(self) -> None:
        self._seen: dict[tuple[str, int], _Seen] = {}

    def of(self, name: str, x: Tensor, batch: int, features_last: bool, given: Callable[[Tensor], bool]) -> Layout:
        """The layout of a call.

        Args:
            name: the layer's.
            x: its input.
            batch: B.
            features_last: the layer works on the last axis alone, so that all others may be in any order.
            given: whether a tensor is (a view of) one of the model's own inputs.

        Raises:
            UserError: the shape fits no order, or contradicts one that was used before.
        """
        if x.dim() == 0:
            return NONE
        if batch <= 1:
            return FIRST if x.shape[0] == batch else Layout(Order.FOLDED, x.shape[0])
        fits = _orders(x, batch, features_last)
        if x.requires_grad:  # it holds the batch somewhere
            fits.discard(Order.NONE)
        if not fits:
            raise UserError(
                f"Layer {name!r} got an input of shape {tuple(x.shape)}, none of whose axes holds the {batch} examples: "
                "the first axis of every layer's input must be the batch."
            )
        seen = self._seen.setdefault((name, x.dim()), _Seen())
        if batch not in seen.lengths:
            constant = Order.NONE in fits and x.shape[0] in seen.lengths.values()
            seen.fits &= fits - {Order.FOLDED} if constant else fits
            seen.lengths[batch] = x.shape[0]
            if not seen.used <= seen.fits:
                raise UserError(
                    f"Layer {name!r} got an input of shape {tuple(x.shape)} for {batch} examples, which shows that "
                    "another axis was taken for the batch before: run groupwise.clipping.verify before training."
                )
        possible = (seen.fits & fits) or fits
        order = next(order for order in _ranked(x, len(seen.lengths) > 1, given) if order in possible)
        if order is Order.FOLDED:
            return Layout(seen.proven or order, x.shape[0] // batch)
        return Layout(order)

    def use(self, name: str, rank: int, layout: Layout) -> None:
        """Gradients are told apart by this layout."""
        if (seen := self._seen.get((name, rank))) is not None:
            seen.used.add(Order.FOLDED if layout.order is Order.STACKED else layout.order)

    def prove(self, name: str, rank: int, order: Order) -> None:
        """Remember in which of two orders a layer's k rows an example come."""
        self._seen[name, rank].proven = order

    def order_of(self, name: str, rank: int) -> Order | None:
        """FOLDED or STACKED, if the gradients have shown it."""
        seen = self._seen.get((name, rank))
        return None if seen is None else seen.proven

    def proven(self, name: str, rank: int) -> bool:
        """Whether `prove` was called."""
        seen = self._seen.get((name, rank))
        return seen is None or seen.proven is not None


def _orders(x: Tensor, batch: int, features_last: bool) -> set[Order]:
    """The orders that a shape fits."""
    fits, features = {Order.NONE}, 1 if x.is_floating_point() else 0
    if x.shape[0] == batch:
        fits.add(Order.FIRST)
    elif x.dim() > features and x.shape[0] % batch == 0 and x.shape[0] > 0:
        fits.add(Order.FOLDED)
    if features_last and x.dim() > 1 + features and x.shape[1] == batch:
        fits.add(Order.SECOND)
    return fits


def _ranked(x: Tensor, resolved: bool, given: Callable[[Tensor], bool]) -> Sequence[Order]:
    """All orders, the likeliest first; before two sizes of batches were seen shapes may coincide."""
    if not resolved and not x.requires_grad and not given(x):
        if x.dim() == 1 and not x.is_floating_point():
            return Order.NONE, Order.FIRST, Order.FOLDED
        return Order.FIRST, Order.NONE, Order.SECOND, Order.FOLDED
    return Order.FIRST, Order.SECOND, Order.FOLDED, Order.NONE


def owners_agree(plain: Tensor, weighed: Tensor, weights: Tensor, layout: Layout) -> bool:
    """Whether the rows of a layer's output belong to examples as a layout says.

    Args:
        plain: gradient of Σ_i loss_i for the output, (B·k, ...).
        weighed: gradient of Σ_i w_i·loss_i for it.
        weights: w, (B,), all different.
        layout: FOLDED or STACKED.
    """
    a, b = layout.examples_first(plain), layout.examples_first(weighed)
    w = weights.to(a.dtype).view(-1, *(1,) * (a.dim() - 1))
    return bool(torch.linalg.vector_norm(b - w * a) <= 1e-3 * torch.linalg.vector_norm(a))
