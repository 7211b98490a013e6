"""Adds clipped sums to the gradients of parameters, which nothing else may reach meanwhile."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from groupwise.errors import UserError


class ClippedGradients:
    """The gradients of a model's trainable parameters, while a backward pass runs.

    Args:
        parameters: those that train, by name.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self._parameters = dict(parameters)
        self._sums: dict[int, Tensor] = {}

    @contextmanager
    def collected(self) -> Iterator[None]:
        """Inside, .grad is None; afterwards it is what it was, and the sums that were added.

        Raises:
            UserError: autograd found a gradient for a parameter.
        """
        for parameter in self._parameters.values():
            if parameter.grad is not None:
                self._sums[id(parameter)] = parameter.grad
                parameter.grad = None
        bypassed: list[str] = []
        try:
            yield
            bypassed = [name for name, parameter in self._parameters.items() if parameter.grad is not None]
        finally:
            for parameter in self._parameters.values():
                parameter.grad = self._sums.pop(id(parameter), None)
        if bypassed:
            refuse_bypass(bypassed[0])

    def add(self, parameter: Tensor, total: Tensor) -> None:
        """Add a clipped sum, of the parameter's shape."""
        known = self._sums.get(id(parameter))
        if known is not None:
            known.add_(total)
        elif total.stride() != parameter.stride() or total.dtype != parameter.dtype:
            self._sums[id(parameter)] = torch.empty_like(parameter).copy_(total)
        else:
            self._sums[id(parameter)] = total

    def check(self) -> None:
        """Refuse a parameter without a gradient, by name."""
        for name, parameter in self._parameters.items():
            if id(parameter) not in self._sums:
                raise UserError(f"Parameter {name!r} trains but got no gradient: freeze it, or use it.")


def refuse_bypass(name: str) -> None:
    """Refuse a parameter that leads to the losses past its group, by name."""
    raise UserError(
        f"Parameter {name!r} is used outside its own layer's forward, where its gradient cannot be clipped: call the "
        "layer instead, or wrap the computation in a module that owns the parameter; for a penalty on weights use the "
        "optimizer's weight_decay."
    )
