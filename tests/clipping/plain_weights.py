"""Two ways to use a module's weights: by ordinary autograd, and with late gradients, found for all steps at once."""

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
        return PlainLate(self._get(weight), self._get(bias), steps)

    def embedding(self, x: Tensor, weight: str, padding_idx: int | None) -> Tensor:
        return F.embedding(x, self._get(weight), padding_idx)

    def each(self, name: str, batch: int) -> Tensor:
        parameter = self._get(name)
        return parameter.unsqueeze(0).expand(batch, *parameter.shape)


@dataclass
class PlainLate:
    """A linear map in each step; every step is used once."""

    weight: Tensor
    bias: Tensor | None
    steps: int
    seen: set[int] = field(default_factory=set)

    def step(self, t: int, x_t: Tensor) -> Tensor:
        assert 0 <= t < self.steps and t not in self.seen
        self.seen.add(t)
        return F.linear(x_t, self.weight, self.bias)


class SequenceWeights(PlainWeights):
    """The same with one gradient for all steps: what an engine that clips has to do."""

    def late_linear(self, weight: str, bias: str | None, steps: int, like: Tensor) -> SequenceLate:
        return SequenceLate(self._get(weight), self._get(bias), steps, like)


class SequenceLate:
    """Values from the detached weight; its gradient flows through slices of a zero tensor (B, steps, p)."""

    def __init__(self, weight: Tensor, bias: Tensor | None, steps: int, like: Tensor) -> None:
        self.weight, self.bias = weight.detach(), None if bias is None else bias.detach()
        self.inputs: list[Tensor | None] = [None] * steps
        self.zeros = _Zeros.apply(self, (len(like), steps, len(weight)), weight, bias).unbind(1)

    def step(self, t: int, x_t: Tensor) -> Tensor:
        self.inputs[t] = x_t.detach()
        return F.linear(x_t, self.weight, self.bias) + self.zeros[t]


class _Zeros(torch.autograd.Function):
    """Zeros whose gradient (B, steps, p) is that of all steps' outputs."""

    @staticmethod
    def forward(ctx: Any, late: SequenceLate, shape: tuple[int, ...], weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.late = late
        return weight.new_zeros(shape)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        inputs = torch.stack(ctx.late.inputs, 1)
        bias = None if ctx.late.bias is None else g.sum((0, 1))
        return None, None, g.flatten(0, 1).t() @ inputs.flatten(0, 1), bias
