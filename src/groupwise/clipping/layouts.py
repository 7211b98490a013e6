"""Tells which axis of a tensor counts examples, from its shape and those of the model's inputs."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_leaves

from groupwise.errors import UserError


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
class BatchAxis:
    """Where a tensor's examples are: on `axis`, `each` rows in a row for every example; and whether that is certain."""

    axis: int = 0
    each: int = 1
    certain: bool = True

    @property
    def order(self) -> Order:
        """The same as an order."""
        return Order.SECOND if self.axis else Order.FOLDED if self.each > 1 else Order.FIRST

    def moved(self, by: int) -> "BatchAxis":
        """The same with that many axes in front."""
        return BatchAxis(self.axis + by, self.each, self.certain) if by else self


@dataclass(frozen=True)
class Layout:
    """The order of a call's rows, and k, how many of them belong to each example."""

    order: Order
    each: int = 1
    certain: bool = True
    """Whether shapes alone tell it; otherwise gradients must."""
    pattern: "Pattern | None" = field(default=None, compare=False)
    """What gradients show once for all sizes of batches."""

    def examples_first(self, t: Tensor) -> Tensor:
        """(…) -> (B, …) for FIRST and SECOND, (B, k, …) for the two with k rows an example."""
        if self.order is Order.SECOND:
            return t.movedim(1, 0)
        if self.order is Order.FOLDED:
            return t.unflatten(0, (-1, self.each)) if self.each else t.unsqueeze(0)  # no rows: of one example
        if self.order is Order.STACKED:
            return t.unflatten(0, (self.each, -1)).movedim(1, 0)
        return t

    def rows_of(self, rows: int, examples: slice) -> Tensor:
        """Numbers of the rows (of B·k) that belong to some of the examples, in such an order that the layout still
        holds for them."""
        chosen = self.examples_first(torch.arange(rows))[examples]
        return (chosen.mT if self.order is Order.STACKED else chosen).flatten()


Pattern = tuple[object, ...]
"""A call's order, k, and the axes of its input but the batch's; whether it depends on parameters."""

Doubt = tuple[str, torch.Size, Order]
"""Which parameter met a tensor of what shape, and how its batch was taken to be held."""

FIRST, NONE = Layout(Order.FIRST), Layout(Order.NONE)
FOLDS = {Order.FOLDED, Order.STACKED}
MOST_TOLD = 1 << 14
"""Calls whose layouts are remembered: texts have many lengths."""


@dataclass(frozen=True)
class _Shape:
    """What the shape of one call's input says."""

    length: int
    """Of its first axis."""
    batch: int
    """B."""
    fits: set[Order]
    """The orders that it fits."""
    elsewhere: bool
    """Whether an axis that no order looks at could hold the batch."""
    own: bool
    """Whether it is (a view of) one of the model's own inputs."""


@dataclass
class _Seen:
    """What the calls of one layer, on inputs with so many axes, have shown."""

    fits: set[Order] = field(default_factory=lambda: set(Order))
    """The orders that fit all sizes of batches so far."""
    lengths: dict[int, int] = field(default_factory=dict)
    """Size of a batch -> length of the input's first axis."""
    elsewhere: bool = True
    """Whether at every size of batches an axis could hold it that no order looks at."""
    mixed: bool = False
    """Whether calls in different orders were seen, so that none tells anything about another."""
    shared: bool = False
    """Whether a call's first axis was not of the batch's size: what has that size by chance may be no batch either."""
    guessed: bool = False
    """Whether a call's first axis was, and it was taken for something that all examples share."""
    proven: Order | None = None
    """The order that the gradients of the losses have shown."""

    @property
    def resolved(self) -> bool:
        """Whether batches of several sizes were seen."""
        return len(self.lengths) > 1

    def learn(self, shape: _Shape) -> None:
        """Take in what a call shows."""
        self.mixed |= not self.fits & shape.fits
        if shape.batch not in self.lengths:
            constant = Order.NONE in shape.fits and shape.length in self.lengths.values()
            self.fits &= shape.fits - FOLDS if constant else shape.fits
            self.lengths[shape.batch] = shape.length
            self.elsewhere &= shape.elsewhere

    def choose(self, shape: _Shape, alike: bool, ranked: Sequence[Order]) -> tuple[Order, bool]:
        """The likeliest order of a call, and whether gradients have proven it; `ranked`: all, the likeliest first."""
        if self.shared and Order.NONE in shape.fits and not shape.own and not self._grows(shape.length / shape.batch):
            chosen, known = Order.NONE, False
        elif alike and self.proven is not None and self.proven in shape.fits:
            chosen, known = self.proven, True
        else:
            possible = shape.fits if shape.own and not alike else self._possible(shape)
            chosen, known = next(order for order in ranked if order in possible), False
        if chosen is Order.NONE:
            self.shared |= Order.FIRST not in shape.fits
            self.guessed |= Order.FIRST in shape.fits
        return chosen, known

    def leaves_only(self, order: Order, shape: _Shape, alike: bool) -> bool:
        """Whether shapes alone rule out all orders but this."""
        varies = self.resolved and alike and not (self.shared or self.guessed)
        rivals = (self._possible(shape) if alike else shape.fits) - {order}
        if shape.own or varies:
            rivals -= {Order.NONE}
        return not rivals and not (shape.elsewhere and (self.elsewhere or not alike))

    def _possible(self, shape: _Shape) -> set[Order]:
        """The orders that fit a call and all that was seen; where none does, those that fit the call."""
        return (self.fits & shape.fits) or shape.fits

    def _grows(self, each: float) -> bool:
        """Whether the first axis was `each` > 1 times as long as the batch at three sizes of batches or more."""
        return each > 1 and len(self.lengths) > 2 and {n / batch for batch, n in self.lengths.items()} == {each}

    @property
    def state(self) -> tuple[object, ...]:
        """What a call may change that matters to other calls."""
        return self.mixed, self.shared, self.guessed, len(self.lengths)


class Layouts:
    """What is known of the layers' inputs.

    One shape may fit several orders (a sequence as long as the batch). A first call takes the likeliest, each batch of
    another size rules out what does not fit it, and where several are left the gradients of the losses decide (see
    `ownership.py`) before any gradient is told apart.
    """

    def __init__(self) -> None:
        self._seen: dict[tuple[str, int, bool], _Seen] = {}
        self._trusted: set[Doubt] = set()
        self._told: dict[tuple[object, ...], Layout] = {}
        """What was said of calls that taught nothing new."""
        self.shown: set[tuple[str, tuple[Pattern, ...]]] = set()
        """The calls of a layer, or meetings of a parameter, that gradients have confirmed in a forward pass."""

    def of(
        self,
        name: str,
        x: Tensor,
        batch: int,
        features_last: bool,
        given: Callable[[Tensor], bool],
        alike: bool = True,
    ) -> Layout:
        """The layout of a call.

        Args:
            name: the layer's.
            x: its input.
            batch: B.
            features_last: the layer works on the last axis alone, so that all others may be in any order.
            given: whether a tensor is (a view of) one of the model's own inputs.
            alike: all calls under this name have the same layout, so that what was seen before counts.

        Raises:
            UserError: the shape fits no order.
        """
        if x.dim() == 0:
            return NONE
        if batch <= 1:
            return FIRST if x.shape[0] == batch else Layout(Order.FOLDED, x.shape[0])
        own = not x.requires_grad and given(x)
        call = (name, x.shape, x.dtype, x.requires_grad, batch, features_last, own, alike)
        if (told := self._told.get(call)) is not None:
            return told
        fits = _orders(x, batch, features_last)
        if x.requires_grad:  # it holds the batch somewhere
            fits.discard(Order.NONE)
        if not fits:
            raise UserError(
                f"{name} got an input of shape {tuple(x.shape)}, none of whose axes holds the {batch} examples (as "
                "many as the model's first input has rows), so it cannot be told whose rows they are: keep the batch "
                "as first axis, or give batch_axis=1; where data choose the rows (experts, graphs end to end), let "
                "each example have all of them, padded or masked (transformers: experts_implementation='batched_mm'); "
                "or freeze it."
            )
        seen = self._seen.setdefault((name, x.dim() - x.is_floating_point(), x.requires_grad), _Seen())
        before = seen.state
        shape = _Shape(x.shape[0], batch, fits, _elsewhere(x, batch, features_last and alike), own)
        seen.learn(shape)
        alike = alike and not seen.mixed
        order, known = seen.choose(shape, alike, _ranked(x, seen.resolved, own))
        trusted = order is Order.NONE or (name, x.shape, order) in self._trusted
        certain = known or trusted or seen.leaves_only(order, shape, alike)
        layout = Layout(order, x.shape[0] // batch if order in FOLDS else 1, certain)
        if order is not Order.NONE:  # which is right of any tensor
            rest = (x.shape[0], *x.shape[2:]) if order is Order.SECOND else x.shape[1:]
            layout = replace(layout, pattern=(order, layout.each, *rest, x.requires_grad))
        if before != seen.state or len(self._told) == MOST_TOLD:
            self._told.clear()
        self._told[call] = layout
        return layout

    def trust(self, doubts: "set[Doubt]") -> None:
        """Gradients have shown that these were taken rightly."""
        self._trusted |= doubts
        self._told.clear()

    def prove(self, name: str, rank: int, requires_grad: bool, orders: set[Order]) -> None:
        """Remember what the gradients have shown, for inputs with `rank` axes beside that of the features."""
        self._told.clear()
        seen = self._seen.setdefault((name, rank, requires_grad), _Seen())
        seen.mixed |= len(orders | ({seen.proven} if seen.proven else set())) > 1
        seen.proven = None if seen.mixed else next(iter(orders))


def _orders(x: Tensor, batch: int, features_last: bool) -> set[Order]:
    """The orders that a shape fits."""
    fits, features = {Order.NONE}, 1 if x.is_floating_point() else 0
    if x.shape[0] == batch:
        fits.add(Order.FIRST)
    elif x.dim() > features and x.shape[0] % batch == 0 and x.shape[0] > 0:
        fits |= FOLDS
    if features_last and x.dim() > 1 + features and x.shape[1] == batch:
        fits.add(Order.SECOND)
    return fits


def _elsewhere(x: Tensor, batch: int, features_last: bool) -> bool:
    """Whether an axis that no order looks at could hold the batch: T = B in (T, d, B), or (T, k·B, d)."""
    last = x.dim() - (1 if features_last and x.is_floating_point() else 0)
    return any(size and size % batch == 0 for size in x.shape[1:last])


def _ranked(x: Tensor, resolved: bool, given: bool) -> Sequence[Order]:
    """All orders, the likeliest first; before two sizes of batches were seen shapes may coincide."""
    if not resolved and not x.requires_grad and not given:
        if x.shape[0] == 1 or (x.dim() == 1 and not x.is_floating_point()):
            return Order.NONE, Order.FIRST, Order.FOLDED, Order.STACKED
        if x.dim() > 3:  # images, which no model has as constants
            return Order.FIRST, Order.SECOND, Order.FOLDED, Order.STACKED, Order.NONE
        return Order.FIRST, Order.SECOND, Order.NONE, Order.FOLDED, Order.STACKED
    return Order.FIRST, Order.SECOND, Order.FOLDED, Order.STACKED, Order.NONE


class ModelCall:
    """A call of the outermost module: how many examples it has, and which tensors it was given."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any], axis: int) -> None:
        self.given: set[int] = set()
        self.certain: dict[Doubt, bool] = {}
        """Whether its first question about a parameter and a shape was answered with certainty."""
        self.batch: int | None = None
        self.counted: int | None = None
        """Of which tensor that is the number of rows, its `id`."""
        self.turned = False
        """Whether an input was met with the batch on an axis that is none of its orders'."""
        packed = next((value for value in (*args, *kwargs.values()) if isinstance(value, PackedSequence)), None)
        if packed is not None:
            self.batch = int(packed.batch_sizes[0])
        for leaf in _tensors((args, kwargs)):
            if leaf.is_nested:
                raise UserError(
                    "The model got a nested tensor, whose examples are not told apart: pad them to the longest "
                    "(torch.nested.to_padded_tensor), and give the model a mask."
                )
            if self.batch is None and leaf.dim() > axis:
                self.batch, self.counted = leaf.shape[axis], id(leaf)
            if leaf.numel():
                try:
                    self.given.add(leaf.untyped_storage().data_ptr())
                except NotImplementedError as error:
                    raise UserError(
                        "The model got a tensor that has no memory of its own: give it dense ones, of the whole batch, "
                        "outside of torch.func (vmap, grad, jvp)."
                    ) from error

    def is_given(self, x: Tensor) -> bool:
        """Whether x is one of the tensors, or a view of one."""
        return x.untyped_storage().data_ptr() in self.given


def _tensors(nested: Any) -> Iterable[Tensor]:
    """All tensors of nested arguments, in order; of mappings that torch does not know too."""
    for leaf in tree_leaves(nested):
        if isinstance(leaf, Tensor):
            yield leaf
        elif isinstance(leaf, Mapping):
            yield from _tensors(dict(leaf))
