"""Clips a parameter that a module uses by itself: its copies' gradients are the per-example gradients."""

from torch import Tensor, nn

from groupwise.clipping.costs import Shared
from groupwise.clipping.rules.base import Gradients, Saved, Wanted, upcast
from groupwise.clipping.rules.per_example import PerExampleRule
from groupwise.errors import UserError


class ParameterRule(PerExampleRule):
    """One parameter (*shape) of a module that has no rule, or is bypassed; see `groupwise.clipping.per_example`."""

    def __init__(self, module: nn.Module, name: str, shared: Shared) -> None:
        super().__init__(module, shared)
        self.parameter_names = (name,)  # type: ignore[misc]

    def forward(self, x: Tensor, *parameters: Tensor | None) -> tuple[Tensor, Saved]:
        """It is no layer."""
        raise UserError(f"Parameter {self.parameter_names[0]!r} was called as a layer.")

    def input_gradient(self, saved: Saved, g: Tensor) -> None:
        """It has no input."""

    def per_example_gradients(self, saved: Saved, g: Tensor, wanted: Wanted) -> Gradients:
        """The gradients of the copies, (B, *shape)."""
        return (upcast(g),)
