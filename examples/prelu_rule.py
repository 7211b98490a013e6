"""PReLU: one example's weight gradient is the sum of g·min(0, x) over its positions."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from groupwise.clipping.precision import upcast
from groupwise.clipping.rules.base import Gradients, LayerRule, Saved, Wanted, register_rule


@register_rule
class PReLURule(LayerRule):
    """`nn.PReLU`: one slope for all channels (1,), or one for each (C,) of axis 1."""

    layer_type = nn.PReLU
    parameter_names = ("weight",)

    def forward(self, x: Tensor, *parameters: Tensor | None) -> tuple[Tensor, Saved]:
        assert parameters[0] is not None
        return F.prelu(x, parameters[0]), (x, parameters[0])

    def input_gradient(self, saved: Saved, g: Tensor) -> Tensor:
        x, weight = saved
        assert x is not None and weight is not None
        slope = weight.view(-1, *[1] * (x.dim() - 2))  # (C, 1, ...), or (1, 1, ...)
        return torch.where(x > 0, g, g * slope)

    def per_example_gradients(self, saved: Saved, g: Tensor, wanted: Wanted) -> Gradients:
        x, weight = saved
        assert x is not None and weight is not None
        rows = upcast(g) * upcast(x).clamp_max(0)  # (B, C, ...)
        return (rows.reshape(len(rows), len(weight), -1).sum(2),)
