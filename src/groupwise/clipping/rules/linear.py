"""Clips linear layers on inputs of any number of axes: `nn.Linear`, and Hugging Face's `Conv1D` (GPT-2).

For y = x Wᵀ + b at T positions (the product of all axes between batch and features) one example's gradients are
dW = Σ_t g_t x_tᵀ = GᵀX and db = Σ_t g_t; everything else follows in `matrix.py`.
"""

from collections.abc import Sequence
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from groupwise.clipping.cost_model import OuterProducts
from groupwise.clipping.precision import keeps_half, upcast
from groupwise.clipping.rules.base import Saved, register_rule
from groupwise.clipping.rules.matrix import MatrixRule


@register_rule
class LinearRule(MatrixRule):
    """`nn.Linear`: weight (p, d), bias (p,)."""

    layer_type: ClassVar[type[nn.Module]] = nn.Linear
    features_last: ClassVar[bool] = True
    stacks: ClassVar[bool] = True

    def forward(self, x: Tensor, *parameters: Tensor | None) -> tuple[Tensor, Saved]:
        weight, bias = parameters
        assert weight is not None
        return F.linear(x, weight.t() if self.transposed else weight, bias), (x, weight)

    def arrange(self, saved: Saved, g: Tensor) -> Tensor:
        return g.contiguous()

    def input_gradient(self, saved: Saved, g: Tensor) -> Tensor:
        _, weight = saved
        assert weight is not None
        return g @ (weight.t() if self.transposed else weight)

    def rows(self, saved: Saved, g: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs (B, T, d) and output gradients (B, T, p): both bfloat16, or float32 at least."""
        x = saved[0]
        assert x is not None
        return (_as_rows(x), _as_rows(g)) if keeps_half(x, g) else (_as_rows(upcast(x)), _as_rows(upcast(g)))

    def stack(self, calls: Sequence[tuple[Saved, Tensor]]) -> tuple[Saved, Tensor]:
        """Calls one after the other along the sequence: (B, ΣT, d) and (B, ΣT, p)."""
        inputs, gradients = zip(*(self.rows(saved, g) for saved, g in calls), strict=True)
        return (torch.cat(inputs, 1), calls[0][0][1]), torch.cat(gradients, 1)

    def outer_products(self, saved: Saved, g: Tensor) -> OuterProducts:
        x, g = self.rows(saved, g)
        return OuterProducts(x, g) if self.transposed else OuterProducts(g, x)


@register_rule
class HFConv1DRule(LinearRule):
    """`transformers.pytorch_utils.Conv1D`: weight (d, p), bias (p,).

    The class is recognised by its name and module, so that transformers need not be installed.
    """

    transposed: ClassVar[bool] = True

    @classmethod
    def handles(cls, module: nn.Module) -> bool:
        return any(
            kind.__name__ == "Conv1D"
            and kind.__module__ == "transformers.pytorch_utils"
            and type(module).forward is kind.__dict__.get("forward")
            for kind in type(module).__mro__
        )

    def forward(self, x: Tensor, *parameters: Tensor | None) -> tuple[Tensor, Saved]:
        weight, bias = parameters
        assert weight is not None
        rows = x.reshape(-1, x.shape[-1])
        y = rows @ weight if bias is None else bias.addmm(rows, weight)
        return y.view(*x.shape[:-1], weight.shape[1]), (x, weight)


def _as_rows(t: Tensor) -> Tensor:
    """(B, ..., n) -> (B, T, n)."""
    if t.dim() == 3:
        return t
    return t.unsqueeze(1) if t.dim() == 2 else t.reshape(t.shape[0], -1, t.shape[-1])
