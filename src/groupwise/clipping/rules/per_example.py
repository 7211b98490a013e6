"""Clips from materialised per-example gradients, which is right where a layer has few parameters.

The same serves single parameters, whose copies' gradients are the per-example gradients, and layers that see k rows of
every example (frames, windows, choices), whose gradients are added up for each example.
"""

from functools import partial

import torch
from torch import Tensor, nn

from groupwise.clipping.cost_model import CHUNK_FLOATS
from groupwise.clipping.factors import weigh_rows
from groupwise.clipping.layouts import Layout
from groupwise.clipping.norm_terms import RowTerms, Terms
from groupwise.clipping.precision import sum_of_squares, upcast
from groupwise.clipping.rules.base import (
    MOST_KEPT,
    Clip,
    Finish,
    Gradients,
    LayerRule,
    RuleContext,
    Saved,
    Wanted,
    numbers,
)
from groupwise.errors import UserError


class PerExampleRule(LayerRule):
    """Everything from `per_example_gradients`, which are small."""

    def weighted_sum(
        self, saved: Saved, g: Tensor, factors: Tensor | None, wanted: Wanted, context: RuleContext
    ) -> Gradients:
        gradients = self.per_example_gradients(saved, g, wanted)
        if factors is None:
            return tuple(None if rows is None else rows.sum(0) for rows in gradients)
        return weigh_gradients(gradients, factors)

    def clipped_sum(self, saved: Saved, g: Tensor, clip: Clip, wanted: Wanted, context: RuleContext) -> Gradients:
        gradients = self.per_example_gradients(saved, g, wanted)
        return weigh_gradients(gradients, clip(sum_of_squares(gradients)))

    def defers(self, saved: Saved, g: Tensor, wanted: Wanted, context: RuleContext) -> bool:
        """Only gradients are kept, if `book_keep` keeps them, so the parameters' size counts."""
        gradients = len(g) * numbers(*(p for p, each in zip(self.values(), wanted, strict=True) if each))
        return gradients <= min(MOST_KEPT, numbers(*saved, g)) or super().defers(saved, g, wanted, context)

    def book_keep(self, saved: Saved, g: Tensor, wanted: Wanted, context: RuleContext) -> tuple[Terms | Tensor, Finish]:
        gradients = self.per_example_gradients(saved, g, wanted)
        keeps = numbers(*gradients) <= numbers(*saved, g)
        terms = RowTerms(gradients)
        if keeps and terms.few:
            return terms, terms
        squares = sum_of_squares(gradients)
        if keeps:
            return squares, partial(weigh_gradients, gradients)
        return squares, partial(self.weighted_sum, saved, g, wanted=wanted, context=context)


class ParameterRule(PerExampleRule):
    """One parameter (*shape) of a module that has no rule, or is bypassed; see `groupwise.clipping.per_example`."""

    def __init__(self, module: nn.Module, name: str) -> None:
        super().__init__(module)
        self.parameter_names = (name,)  # type: ignore[misc]

    def values(self) -> list[Tensor | None]:
        """The parameter, which may be inside of a module that the layer claims."""
        return [self.module.get_parameter(self.parameter_names[0])]

    def forward(self, x: Tensor, *parameters: Tensor | None) -> tuple[Tensor, Saved]:
        """It is no layer."""
        raise UserError(f"Parameter {self.parameter_names[0]!r} was called as a layer.")

    def input_gradient(self, saved: Saved, g: Tensor) -> None:
        """It has no input."""

    def per_example_gradients(self, saved: Saved, g: Tensor, wanted: Wanted) -> Gradients:
        """The gradients of the copies, (B, *shape)."""
        return (upcast(g),)


class FoldedRule(PerExampleRule):
    """Another rule on (B·k, …) rows, whose gradients are materialised row by row and added up for each example."""

    def __init__(self, inner: LayerRule, layout: Layout) -> None:
        super().__init__(inner.module)
        self.inner, self.layout = inner, layout
        self.parameter_names = inner.parameter_names  # type: ignore[misc]

    def values(self) -> list[Tensor | None]:
        """As the layer itself."""
        return self.inner.values()

    def forward(self, x: Tensor, *parameters: Tensor | None) -> tuple[Tensor, Saved]:
        """As the layer itself."""
        return self.inner.forward(x, *parameters)

    def input_gradient(self, saved: Saved, g: Tensor) -> Tensor | None:
        """As the layer itself."""
        return self.inner.input_gradient(saved, g)

    def examples(self, saved: Saved, g: Tensor, rows: slice) -> tuple[Saved, Tensor]:
        """The same call for some of its examples only."""
        at = self.layout.rows_of(len(g), rows).to(g.device)
        chosen = tuple(t[at] if i in self.inner.batched and t is not None else t for i, t in enumerate(saved))
        return chosen, g[at]

    def per_example_gradients(self, saved: Saved, g: Tensor, wanted: Wanted) -> Gradients:
        """(B, *shape) for each wanted parameter."""
        size = numbers(*self.values())
        step = max(1, CHUNK_FLOATS // max(1, self.layout.each * size))
        count = len(g) // self.layout.each
        if count <= step:
            return self._added(saved, g, wanted)
        parts = [self._added(*self.examples(saved, g, slice(i, i + step)), wanted) for i in range(0, count, step)]
        return tuple(
            None if of_one[0] is None else torch.cat([r for r in of_one if r is not None])
            for of_one in zip(*parts, strict=True)
        )

    def _added(self, saved: Saved, g: Tensor, wanted: Wanted) -> Gradients:
        rows = self.inner.per_example_gradients(saved, g, wanted)
        return tuple(None if r is None else self.layout.examples_first(upcast(r)).sum(1) for r in rows)


def weigh_gradients(gradients: Gradients, factors: Tensor) -> Gradients:
    """Σ_i factor_i · rows_i for each parameter's per-example gradients (B, *shape)."""
    return tuple(None if rows is None else weigh_rows(factors, rows) for rows in gradients)
