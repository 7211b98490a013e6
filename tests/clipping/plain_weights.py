"""A module's weights by ordinary autograd, but for late gradients, found for all steps at once as an engine does."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass
class PlainWeights:
    """The module's own parameters, and a record of which were used how."""

    module: nn.Module
    used: list[str] = field(default_factory=list)

    def _get(self, name: str | None, rows: slice | None = None) -> Tensor | None:
        if name is None:
            return None
        self.used.append(name)
        parameter = self.module.get_parameter(name)
        return parameter if rows is None else parameter[rows]

    def linear(
        self, x: Tensor, weight: str, bias: str | None, rows: slice | None = None, bias_rows: slice | None = None
    ) -> Tensor:
        return F.linear(x, self._get(weight, rows), self._get(bias, bias_rows or rows))

    def late_linear(self, weight: str, bias: str | None, steps: int, like: Tensor) -> PlainLate:
        return PlainLate(self._get(weight), self._get(bias), steps, like)

    def embedding(self, x: Tensor, weight: str, padding_idx: int | None) -> Tensor:
        return F.embedding(x, self._get(weight), padding_idx)

    def bags(self, x: Tensor, counts: Tensor | None, weight: str, padding_idx: int | None) -> Tensor:
        table = self._get(weight)
        return F.embedding_bag(x, table, mode="sum", per_sample_weights=counts, padding_idx=padding_idx)

    def each(self, name: str, batch: int) -> Tensor:
        parameter = self._get(name)
        return parameter.unsqueeze(0).expand(batch, *parameter.shape)


class PlainLate:
    """Values from the detached weight; its gradient flows through a zero tensor (B, steps, p)."""

    def __init__(self, weight: Tensor, bias: Tensor | None, steps: int, like: Tensor) -> None:
        self.weight, self.bias = weight.detach(), None if bias is None else bias.detach()
        self.inputs: list[Tensor] = []
        self.added = _Zeros.apply(self, (len(like), steps, len(weight)), weight, bias)

    def note(self, x: Tensor) -> None:
        self.inputs.append(x)


class _Zeros(torch.autograd.Function):
    """Zeros whose gradient (B, steps, p) is that of all steps' outputs."""

    @staticmethod
    def forward(ctx: Any, late: PlainLate, shape: tuple[int, ...], weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.late = late
        return weight.new_zeros(shape)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        [inputs] = ctx.late.inputs
        bias = None if ctx.late.bias is None else g.sum((0, 1))
        return None, None, g.flatten(0, 1).t() @ inputs.flatten(0, 1), bias
