"""The loop over single examples, gone through once for several partitions, thresholds and rules."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn


def looped(model: nn.Module, loss_of: Callable[[int], Tensor], examples: Iterable[int]) -> Callable[[int], Tensor]:
    """Losses with the gradients that `loss_of` has for each example alone, found here and now."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    found = {i: torch.autograd.grad(loss_of(i), parameters, allow_unused=True) for i in examples}
    return lambda i: _Known.apply(found[i], *parameters)


class _Known(torch.autograd.Function):
    """A loss of which nothing is known but its gradients."""

    @staticmethod
    def forward(ctx: Any, gradients: tuple[Tensor | None, ...], *parameters: Tensor) -> Tensor:
        ctx.gradients = gradients
        return parameters[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return None, *ctx.gradients
