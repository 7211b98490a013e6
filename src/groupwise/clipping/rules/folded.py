"""Clips a layer that sees k rows of every example (frames, windows, choices): an example's gradient is their sum."""

from typing import Any

from torch import Tensor

from groupwise.clipping.layouts import Layout
from groupwise.clipping.rules.base import Gradients, LayerRule, Saved, Wanted, upcast
from groupwise.clipping.rules.per_example import PerExampleRule


class FoldedRule(PerExampleRule):
    """Another rule on (B·k, …) rows, whose gradients are materialised row by row and added up for each example."""

    def __init__(self, inner: LayerRule, layout: Layout) -> None:
        self.inner, self.layout, self.module, self.shared = inner, layout, inner.module, inner.shared
        self.parameter_names = inner.parameter_names  # type: ignore[misc]

    def forward(self, x: Tensor, *parameters: Tensor | None) -> tuple[Tensor, Saved]:
        """As the layer itself."""
        return self.inner.forward(x, *parameters)

    def input_gradient(self, saved: Saved, g: Tensor) -> Tensor | None:
        """As the layer itself."""
        return self.inner.input_gradient(saved, g)

    def examples(self, saved: Saved, g: Any, rows: slice) -> tuple[Saved, Tensor]:
        """The same call for some of its examples only."""
        at = self.layout.rows_of(len(g), rows).to(g.device)
        chosen = tuple(t[at] if i in self.inner.batched and t is not None else t for i, t in enumerate(saved))
        return chosen, g[at]

    def per_example_gradients(self, saved: Saved, g: Tensor, wanted: Wanted) -> Gradients:
        """(B, *shape) for each wanted parameter."""
        rows = self.inner.per_example_gradients(saved, g, wanted)
        return tuple(None if r is None else self.layout.examples_first(upcast(r)).sum(1) for r in rows)
