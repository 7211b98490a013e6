"""Says where a tensor holds the examples of a batch."""

from dataclasses import dataclass, replace
from enum import Enum

import torch
from torch import Tensor


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

    def moved(self, by: int) -> "Layout":
        """The same with that many axes in front."""
        return replace(self, axis=self.axis + by) if by else self

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
