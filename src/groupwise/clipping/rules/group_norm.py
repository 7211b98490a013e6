"""GroupNorm: per-channel sums of g and g∘x give the per-example gradients, without the normalised input."""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from groupwise.clipping.rules.base import Gradients, Saved, Wanted, in_format_of, register_rule, upcast
from groupwise.clipping.rules.per_example import PerExampleRule

CHUNK_FLOATS = 1 << 18
"""Numbers in the buffer of `_channel_products`: it stays in a core's own cache."""


@register_rule
class GroupNormRule(PerExampleRule):
    """`nn.GroupNorm` on (B, C, ...): weight (C,), bias (C,)."""

    layer_type: ClassVar[type[nn.Module]] = nn.GroupNorm
    parameter_names: ClassVar[tuple[str, ...]] = ("weight", "bias")
    autocast: ClassVar = "float32"
    batched: ClassVar[tuple[int, ...]] = (0, 2, 3)
    module: Any  # a GroupNorm, or what is one with other names (instance_norm.py)

    def _groups(self) -> int:
        return int(self.module.num_groups)

    def forward(self, x: Tensor, *parameters: Tensor | None) -> tuple[Tensor, Saved]:
        weight, bias = parameters
        sizes = (x.shape[0], x.shape[1], x[0, 0].numel(), self._groups())
        y, mean, rstd = torch.native_group_norm(x, weight, bias, *sizes, self.module.eps)
        return y, (x, weight, mean, rstd)

    def arrange(self, saved: Saved, g: Tensor) -> Tensor:
        assert saved[0] is not None
        return in_format_of(saved[0], g)

    def input_gradient(self, saved: Saved, g: Tensor) -> Tensor:
        x, weight, mean, rstd = saved
        assert x is not None
        sizes = (x.shape[0], x.shape[1], x[0, 0].numel(), self._groups())
        backward = torch.ops.aten.native_group_norm_backward
        return backward(g, x, mean, rstd, weight, *sizes, [True, False, False])[0]

    def per_example_gradients(self, saved: Saved, g: Tensor, wanted: Wanted) -> Gradients:
        x, _, mean, rstd = saved
        assert x is not None and mean is not None and rstd is not None
        x, g = upcast(x), upcast(g)
        space = tuple(range(2, x.dim()))
        bias = g.sum(space) if space else g
        if not wanted[0]:
            return None, bias
        product = _channel_products(g, x) if space else g * x
        grouped = (x.shape[0], self._groups(), -1)
        centred = product.view(grouped) - bias.view(grouped) * mean.unsqueeze(-1)
        weight = (centred * rstd.unsqueeze(-1)).view(x.shape[:2])
        return weight, bias if wanted[1] else None


def _channel_products(g: Tensor, x: Tensor) -> Tensor:
    """Σ g∘x over space, (B, C), a few examples at a time: a product of full size would only be written to be read."""
    step = max(1, min(len(g), CHUNK_FLOATS // g[0].numel()))
    buffer = torch.empty_like(g[:step])
    space, sums = tuple(range(2, g.dim())), []
    for start in range(0, len(g), step):
        part = slice(start, start + step)
        sums.append(torch.mul(g[part], x[part], out=buffer[: len(g[part])]).sum(space))
    return torch.cat(sums)
