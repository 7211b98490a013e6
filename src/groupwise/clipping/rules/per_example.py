"""Clips single parameters, and layers that see several rows of every example, from per-example gradients."""

from typing import Any

from torch import Tensor, nn

from groupwise.clipping.clip_plan import Layout
from groupwise.clipping.precision import upcast
from groupwise.clipping.rules.base import Gradients, LayerRule, Saved, Wanted


class ParameterRule(LayerRule):
    """One parameter (*shape) of a module that has no rule, or is bypassed; see `groupwise.clipping.per_example`."""

    batched = ()

    def __init__(self, module: nn.Module, name: str) -> None:
        super().__init__(module)
        self.parameter_names = (name,)  # type: ignore[misc]

    def values(self) -> list[Any]:
        """The parameter, which may be inside of a module that the layer claims."""
        return [self.module.get_parameter(self.parameter_names[0])]

    def per_example_gradients(self, saved: Saved, g: Tensor, wanted: Wanted) -> Gradients:
        """The gradients of the copies, (B, *shape)."""
        return (upcast(g),)


class FoldedRule(LayerRule):
    """Another rule on (B·k, …) rows, whose gradients are materialised row by row and added up for each example."""

    def __init__(self, inner: LayerRule, layout: Layout) -> None:
        super().__init__(inner.module)
        self.inner, self.layout = inner, layout
        self.batched = inner.batched  # type: ignore[misc]

    def values(self) -> list[Any]:
        """As the layer itself."""
        return self.inner.values()

    def count(self, g: Tensor) -> int:
        return len(g) // max(1, self.layout.each)

    def chunk(self, g: Tensor, wanted: Wanted) -> int:
        return max(1, self.inner.chunk(g, wanted) // max(1, self.layout.each))

    def examples(self, saved: Saved, g: Tensor, rows: slice) -> tuple[Saved, Tensor]:
        """The same call for some of its examples only."""
        at = self.layout.rows_of(len(g), rows).to(g.device)
        chosen = tuple(t[at] if i in self.inner.batched and t is not None else t for i, t in enumerate(saved))
        return chosen, g[at]

    def per_example_gradients(self, saved: Saved, g: Tensor, wanted: Wanted) -> Gradients:
        """(B, *shape) for each wanted parameter."""
        rows = self.inner.all_gradients(saved, g, wanted)
        return tuple(None if r is None else self.layout.examples_first(upcast(r)).sum(1) for r in rows)
