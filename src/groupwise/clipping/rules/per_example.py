"""Rules that make everything from materialised per-example gradients: right where a layer has few parameters."""

from torch import Tensor

from groupwise.clipping.factors import weigh_rows
from groupwise.clipping.rules.base import Clip, Gradients, LayerRule, Saved, Wanted, sum_of_squares


class PerExampleRule(LayerRule):
    """For layers with few parameters: their per-example gradients are small, so everything is made from them."""

    def weighted_sum(self, saved: Saved, g: Tensor, factors: Tensor | None, wanted: Wanted) -> Gradients:
        gradients = self.per_example_gradients(saved, g, wanted)
        if factors is None:
            return tuple(None if rows is None else rows.sum(0) for rows in gradients)
        return tuple(None if rows is None else weigh_rows(factors, rows) for rows in gradients)

    def clipped_sum(self, saved: Saved, g: Tensor, clip: Clip, wanted: Wanted) -> Gradients:
        gradients = self.per_example_gradients(saved, g, wanted)
        factors = clip(sum_of_squares(gradients))
        return tuple(None if rows is None else weigh_rows(factors, rows) for rows in gradients)
