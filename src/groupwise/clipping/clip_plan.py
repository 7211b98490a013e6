"""Says where the calls of a model's layers hold the examples: what a trace has found, and a step looks up."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Any

from torch import Tensor

from groupwise.clipping.layouts import SHARED, Layout, Order
from groupwise.errors import UserError

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

    def find_again(self, label: str, x: Tensor, examples: int) -> Layout | None:
        """The layout of a call that runs once more, in the backward pass; None where its size does not tell which."""
        found = {
            layout for site in self.calls.get(label, ()) if (layout := site.find(tuple(x.shape), examples)) is not None
        }
        return found.pop() if len(found) == 1 else None

    def joined(self, other: "ClipPlan") -> "ClipPlan":
        """What either knows."""
        calls = dict(self.calls)
        for label, sites in other.calls.items():
            pairs = zip_longest(calls.get(label, ()), sites, fillvalue=CallSite())
            calls[label] = tuple(one.joined(two) for one, two in pairs)
        return ClipPlan(calls)

    def state_dict(self) -> dict[str, list[Any]]:
        """Plain values, for a checkpoint."""
        return {
            label: [
                [
                    [[each.axis, each.each, each.order.name] for each in site.layouts],
                    [list(s) for s in sorted(site.shared)],
                ]
                for site in sites
            ]
            for label, sites in self.calls.items()
        }

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Sequence[Any]]) -> "ClipPlan":
        """What `state_dict` returned."""
        return cls(
            {
                label: tuple(
                    CallSite(
                        tuple(Layout(axis, each, Order[order]) for axis, each, order in layouts),
                        frozenset(map(tuple, shared)),
                    )
                    for layouts, shared in sites
                )
                for label, sites in state.items()
            }
        )
