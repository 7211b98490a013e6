"""Hugging Face's `Conv1D` (GPT-2): a linear layer whose weight is stored as (d, p).

The class is recognised by its name and module, so that transformers need not be installed.
"""

from typing import ClassVar

from torch import Tensor, nn

from groupwise.clipping.rules.base import Saved, register_rule
from groupwise.clipping.rules.linear import LinearRule


@register_rule
class HFConv1DRule(LinearRule):
    """`transformers.pytorch_utils.Conv1D`: weight (d, p), bias (p,)."""

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
