"""Says where tensors hold the examples of a batch: what a trace has found of a model's calls, and a step looks up."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from groupwise.errors import UserError


class Order(Enum):
    """How the rows of one axis belong to the examples."""

    GROUPED = "each example's rows together, as by repeat_interleave"
    """(B·k, ...): windows of an image, choices of a question, frames of a film; and k = 1."""
    TILED = "one row of every example after the other, as by cat"
    """(k·B, ...): the two halves of a pair after `torch.cat`."""
    SHARED = "no axis"
    """The same for every example: positions, learned queries."""


@dataclass(frozen=True)
class Layout:
    """Where a tensor holds the batch: on `axis`, k = `each` rows for every example, in an order."""

    axis: int = 0
    each: int = 1
    order: Order = Order.GROUPED

    @property
    def shared(self) -> bool:
        """Whether the tensor is the same for all examples."""
        return self.order is Order.SHARED

    def examples_first(self, t: Tensor) -> Tensor:
        """(B, …) where an example has one row, else (B, k, …); the batch is on axis 0, or on another with k = 1."""
        if self.axis:
            return t.movedim(self.axis, 0)
        if self.each == 1:
            return t
        if self.order is Order.TILED:
            return t.unflatten(0, (self.each, -1)).movedim(1, 0)
        return t.unflatten(0, (-1, self.each)) if self.each else t.unsqueeze(0)  # no rows: of one example

    def rows_of(self, rows: int, examples: slice) -> Tensor:
        """Numbers of the rows (of B·k, on whatever axis) that belong to some of the examples, in such an order that the
        layout still holds for them."""
        chosen = replace(self, axis=0).examples_first(torch.arange(rows))[examples]
        return (chosen.mT if self.order is Order.TILED and self.each > 1 else chosen).flatten()


FIRST, SHARED = Layout(), Layout(order=Order.SHARED)

LENGTHS = 3
"""Numbers of rows an example that traces of a call have shown, from which on any number is taken."""


class UntracedCall(UserError):
    """A call that the plan does not know: trace again, with examples like those of this batch."""


@dataclass(frozen=True)
class CallSite:
    """How one call of a layer or parameter was seen to hold the batch: as a rule in one way, whatever the examples.

    Args:
        layouts: those with the batch on an axis.
        shared: shapes of inputs that all examples shared.
    """

    layouts: tuple[Layout, ...] = ()
    shared: frozenset[tuple[int, ...]] = frozenset()

    def find(self, shape: tuple[int, ...], examples: int) -> Layout | None:
        """The layout of an input of this shape in a batch of B examples; None where sizes do not tell one."""
        fits = {layout for layout in self.layouts if _fits(layout, shape, examples)}
        fits |= {found for layout in self.layouts if (found := self._of_any_length(layout, shape, examples))}
        if self.shared and self._is_shared(shape, examples):
            fits.add(SHARED)
        return fits.pop() if len(fits) == 1 else None

    def _is_shared(self, shape: tuple[int, ...], examples: int) -> bool:
        """Whether a shape is one of those that were shared, or differs from one where no axis could hold the batch."""
        return shape in self.shared or any(
            len(shape) == len(known) and all(n == m or n % examples for n, m in zip(shape, known, strict=True))
            for known in self.shared
        )

    def _of_any_length(self, layout: Layout, shape: tuple[int, ...], examples: int) -> Layout | None:
        """The layout with as many rows an example as a shape has, if traces have shown them in several numbers: they
        follow the inputs' sizes then. Of rows that data choose, another number would hardly have been traced."""
        rows = shape[layout.axis] if layout.axis < len(shape) else -1
        if rows < 0 or rows % examples or len(self._like(layout)) < LENGTHS:
            return None
        return replace(layout, each=rows // examples)

    def joined(self, other: "CallSite") -> "CallSite":
        """What either has shown."""
        new = (layout for layout in other.layouts if layout not in self.layouts and len(self._like(layout)) < LENGTHS)
        return CallSite((*self.layouts, *new), self.shared | other.shared)

    def _like(self, layout: Layout) -> list[Layout]:
        """Those on the same axis in the same order, with whatever number of rows."""
        return [known for known in self.layouts if (known.axis, known.order) == (layout.axis, layout.order)]


def _fits(layout: Layout, shape: tuple[int, ...], examples: int) -> bool:
    return layout.axis < len(shape) and shape[layout.axis] == examples * layout.each


@dataclass(frozen=True)
class ClipPlan:
    """Layer or parameter -> its calls in one forward pass, in their order."""

    calls: Mapping[str, tuple[CallSite, ...]] = field(default_factory=dict)

    def find(self, label: str, nth: int, x: Tensor, examples: int) -> Layout:
        """The layout of the `nth` call (from 0) of a layer or parameter, whose input is x, in a pass of B examples.

        Raises:
            UntracedCall: the plan has no such call, or sizes do not tell which of those that it has.
        """
        known = self.calls.get(label, ())
        site = known[nth] if nth < len(known) else CallSite()
        if len(site.layouts) == 1 and not site.shared:  # the usual case
            [layout] = site.layouts
            if layout.axis < x.dim() and x.shape[layout.axis] == examples * layout.each:
                return layout
        found = site.find(tuple(x.shape), examples)
        if found is None:
            raise UntracedCall(
                f"{label} got a tensor of shape {tuple(x.shape)} in its call {nth + 1} of a batch of {examples} "
                "examples, which the trace has not shown: trace the model on examples like these."
            )
        return found

    def find_again(self, label: str, x: Tensor, examples: int) -> Layout:
        """The layout of a call that runs once more, in the backward pass.

        Raises:
            UserError: its size does not tell which.
        """
        sites = self.calls.get(label, ())
        found = {layout for site in sites if (layout := site.find(tuple(x.shape), examples)) is not None}
        if len(found) != 1:
            raise UserError(
                f"{label} runs inside the backward pass on a tensor of shape {tuple(x.shape)}, which it did not get in "
                "the forward pass, or got with the batch on several axes: use checkpointing with use_reentrant=False, "
                "around this layer alone or not at all."
            )
        return found.pop()

    def joined(self, other: "ClipPlan") -> "ClipPlan":
        """What either knows."""
        calls = dict(self.calls)
        for label, sites in other.calls.items():
            pairs = zip_longest(calls.get(label, ()), sites, fillvalue=CallSite())
            calls[label] = tuple(one.joined(two) for one, two in pairs)
        return ClipPlan(calls)

    def state_dict(self) -> dict[str, list[Any]]:
        """Plain values, for a checkpoint: of each call its layouts, and the shapes that were shared."""

        def plain(site: CallSite) -> list[Any]:
            layouts = [[each.axis, each.each, each.order.name] for each in site.layouts]
            return [layouts, [list(shape) for shape in sorted(site.shared)]]

        return {label: list(map(plain, sites)) for label, sites in self.calls.items()}

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Sequence[Any]]) -> "ClipPlan":
        """What `state_dict` returned."""

        def site(layouts: list[Any], shared: list[Any]) -> CallSite:
            known = tuple(Layout(axis, each, Order[order]) for axis, each, order in layouts)
            return CallSite(known, frozenset(map(tuple, shared)))

        return cls({label: tuple(site(*plain) for plain in sites) for label, sites in state.items()})
