"""Rules that make everything from materialised per-example gradients: right where a layer has few parameters."""

from functools import partial

from torch import Tensor

from groupwise.clipping.factors import weigh_rows
from groupwise.clipping.rules.base import Clip, Finish, Gradients, LayerRule, Saved, Wanted, numbers, sum_of_squares


class PerExampleRule(LayerRule):
    """For layers with few parameters: their per-example gradients are small, so everything is made from them."""

    def weighted_sum(self, saved: Saved, g: Tensor, factors: Tensor | None, wanted: Wanted) -> Gradients:
        gradients = self.per_example_gradients(saved, g, wanted)
        if factors is None:
            return tuple(None if rows is None else rows.sum(0) for rows in gradients)
        return weigh_gradients(gradients, factors)

    def clipped_sum(self, saved: Saved, g: Tensor, clip: Clip, wanted: Wanted) -> Gradients:
        gradients = self.per_example_gradients(saved, g, wanted)
        return weigh_gradients(gradients, clip(sum_of_squares(gradients)))

    def book_keep(self, saved: Saved, g: Tensor, wanted: Wanted) -> tuple[Tensor, Finish]:
        gradients = self.per_example_gradients(saved, g, wanted)
        squares = sum_of_squares(gradients)
        if numbers(*gradients) <= numbers(*saved, *(g if isinstance(g, tuple) else (g,))):
            return squares, partial(weigh_gradients, gradients)
        return squares, partial(self.weighted_sum, saved, g, wanted=wanted)


def weigh_gradients(gradients: Gradients, factors: Tensor) -> Gradients:
    """Σ_i factor_i · rows_i for each parameter's per-example gradients (B, *shape)."""
    return tuple(None if rows is None else weigh_rows(factors, rows) for rows in gradients)
