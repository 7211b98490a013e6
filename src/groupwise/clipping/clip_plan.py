"""Stores the layout of every layer call's input: which axis and rows belong to which example, as the trace found it."""

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
    """(B·k, ...): windows of an image, choices of a question, frames of a video; also k = 1."""
    TILED = "one row of every example after the other, as by cat"
    """(k·B, ...): the two halves of a pair after `torch.cat`."""
    SHARED = "no axis"
    """No batch axis, the same for every example: positions, learned queries."""


@dataclass(frozen=True)
class Layout:
    """Which rows of a tensor belong to which example: k = `rows_per_example` rows each on `axis`, in an order."""

    axis: int = 0
    rows_per_example: int = 1
    order: Order = Order.GROUPED

    def examples_first(self, t: Tensor) -> Tensor:
        """Move the batch to axis 0: (B, …) if k = 1, else (B, k, …). With k > 1 it must be on axis 0 already."""
        if self.axis:
            return t.movedim(self.axis, 0)
        if self.rows_per_example == 1:
            return t
        if self.order is Order.TILED:
            return t.unflatten(0, (self.rows_per_example, -1)).movedim(1, 0)
        if not self.rows_per_example:  # only if B = 1
            return t.unsqueeze(0)
        return t.unflatten(0, (-1, self.rows_per_example))

    def rows_of(self, rows: int, examples: slice) -> Tensor:
        """Indices of the rows (out of B·k, on any axis) that belong to some of the examples, in an order for which the
        layout still holds."""
        chosen = replace(self, axis=0).examples_first(torch.arange(rows))[examples]
        return (chosen.mT if self.order is Order.TILED and self.rows_per_example > 1 else chosen).flatten()


FIRST, SHARED = Layout(), Layout(order=Order.SHARED)

LENGTHS = 3
"""Once traces of a call have shown this many different numbers of rows per example, any number is accepted."""


class UntracedCall(UserError):
    """A layer call that is not in the plan: trace again, with examples like those of this batch."""


@dataclass(frozen=True)
class CallSite:
    """The layouts that traces found for one call of a layer or parameter; usually there is exactly one."""

    layouts: tuple[Layout, ...] = ()
    """Those with a batch axis."""
    shared: frozenset[tuple[int, ...]] = frozenset()
    """The shapes of inputs that all examples shared."""

    def find(self, shape: tuple[int, ...], examples: int) -> Layout | None:
        """The layout of an input of this shape in a batch of B examples; None if the shape fits none, or several."""
        sizes = dict(enumerate(shape))
        fits = {known for known in self.layouts if sizes.get(known.axis) == examples * known.rows_per_example}
        fits |= {found for layout in self.layouts if (found := self._of_any_length(layout, shape, examples))}
        if self.shared and self._is_shared(shape, examples):
            fits.add(SHARED)
        return fits.pop() if len(fits) == 1 else None

    def _is_shared(self, shape: tuple[int, ...], examples: int) -> bool:
        """Whether this shape is shared: as traced, or different only on axes whose size is not a multiple of B."""
        return shape in self.shared or any(
            len(shape) == len(known) and all(n == m or n % examples for n, m in zip(shape, known, strict=True))
            for known in self.shared
        )

    def _of_any_length(self, layout: Layout, shape: tuple[int, ...], examples: int) -> Layout | None:
        """The layout with this shape's number of rows per example, if traces have shown several. Then it follows
        from the inputs' sizes: a number that depends on their values would hardly have passed the traces."""
        rows = shape[layout.axis] if layout.axis < len(shape) else -1
        if rows < 0 or rows % examples or len(self._like(layout)) < LENGTHS:
            return None
        return replace(layout, rows_per_example=rows // examples)

    def joined(self, other: "CallSite") -> "CallSite":
        """The layouts of both."""
        new = (layout for layout in other.layouts if layout not in self.layouts and len(self._like(layout)) < LENGTHS)
        return CallSite((*self.layouts, *new), self.shared | other.shared)

    def _like(self, layout: Layout) -> list[Layout]:
        """The layouts with the same axis and order, with any number of rows per example."""
        return [known for known in self.layouts if (known.axis, known.order) == (layout.axis, layout.order)]


@dataclass(frozen=True)
class ClipPlan:
    """For each layer or parameter, by label, its calls in one forward pass, in order."""

    calls: Mapping[str, tuple[CallSite, ...]] = field(default_factory=dict)

    def find(self, label: str, nth: int, x: Tensor, examples: int) -> Layout:
        """The layout of the `nth` call (from 0) of a layer or parameter, whose input is x, in a pass of B examples.
        Raises `UntracedCall` if the plan has no such call, or the input's shape fits several of its layouts."""
        known = self.calls.get(label, ())
        site = known[nth] if nth < len(known) else CallSite()
        if len(site.layouts) == 1 and not site.shared:  # the usual case
            [layout] = site.layouts
            if layout.axis < x.dim() and x.shape[layout.axis] == examples * layout.rows_per_example:
                return layout
        found = site.find(tuple(x.shape), examples)
        if found is None:
            raise UntracedCall(
                f"{label} got a tensor of shape {tuple(x.shape)} in its call {nth + 1} of a batch of {examples} "
                "examples, which the trace has not seen: run it on the whole batch, not on parts of it, or trace the "
                "model on examples like these."
            )
        return found

    def joined(self, other: "ClipPlan") -> "ClipPlan":
        """The calls of both plans."""
        calls = dict(self.calls)
        for label, sites in other.calls.items():
            pairs = zip_longest(calls.get(label, ()), sites, fillvalue=CallSite())
            calls[label] = tuple(one.joined(two) for one, two in pairs)
        return ClipPlan(calls)

    def state_dict(self) -> dict[str, list[Any]]:
        """Plain values for a checkpoint: the layouts and shared shapes of each call."""

        def plain(site: CallSite) -> list[Any]:
            layouts = [[one.axis, one.rows_per_example, one.order.name] for one in site.layouts]
            return [layouts, [list(shape) for shape in sorted(site.shared)]]

        return {label: list(map(plain, sites)) for label, sites in self.calls.items()}

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Sequence[Any]]) -> "ClipPlan":
        """Rebuild a plan from its `state_dict`."""

        def site(layouts: list[Any], shared: list[Any]) -> CallSite:
            known = tuple(Layout(axis, each, Order[order]) for axis, each, order in layouts)
            return CallSite(known, frozenset(map(tuple, shared)))

        return cls({label: tuple(site(*plain) for plain in sites) for label, sites in state.items()})
