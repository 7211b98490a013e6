"""Clips normalisations with a scale and a shift: LayerNorm, GroupNorm, InstanceNorm.

One example's weight gradient is Σ g∘x̂ and its bias gradient Σ g, over all positions of a channel (or of a number of the
last axes). GroupNorm's come from per-channel sums of g and g∘x, without the normalised input. InstanceNorm is a
GroupNorm of one channel a group.
"""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.modules.instancenorm import _InstanceNorm

from groupwise.clipping.rules.base import Gradients, Saved, Wanted, in_format_of, register_rule
from groupwise.clipping.rules.per_example import PerExampleRule
from groupwise.clipping.squared_norms import upcast
from groupwise.errors import UserError

CHUNK_FLOATS = 1 << 18
"""Numbers in the buffer of `_channel_products`: it stays in a core's own cache."""


@register_rule
class LayerNormRule(PerExampleRule):
    """`nn.LayerNorm` over the trailing axes `normalized_shape`."""

    layer_type: ClassVar[type[nn.Module]] = nn.LayerNorm
    parameter_names: ClassVar[tuple[str, ...]] = ("weight", "bias")
    autocast: ClassVar = "float32"
    features_last: ClassVar[bool] = True
    batched: ClassVar[tuple[int, ...]] = (0, 3, 4)
    module: nn.LayerNorm

    def forward(self, x: Tensor, *parameters: Tensor | None) -> tuple[Tensor, Saved]:
        weight, bias = parameters
        shape = list(self.module.normalized_shape)
        y, mean, rstd = torch.native_layer_norm(x, shape, weight, bias, self.module.eps)
        return y, (x, weight, bias, mean, rstd)

    def arrange(self, saved: Saved, g: Tensor) -> Tensor:
        return g.contiguous()

    def input_gradient(self, saved: Saved, g: Tensor) -> Tensor:
        x, weight, bias, mean, rstd = saved
        shape = list(self.module.normalized_shape)
        backward = torch.ops.aten.native_layer_norm_backward
        return backward(g, x, shape, mean, rstd, weight, bias, [True, False, False])[0]

    def per_example_gradients(self, saved: Saved, g: Tensor, wanted: Wanted) -> Gradients:
        x, _, _, mean, rstd = saved
        assert x is not None and mean is not None and rstd is not None
        g = upcast(g)
        between = tuple(range(1, g.dim() - len(self.module.normalized_shape)))
        weight = bias = None
        if wanted[0]:
            product = (upcast(x) - mean).mul_(rstd).mul_(g)
            weight = product.sum(between) if between else product
        if wanted[1]:
            bias = g.sum(between) if between else g
        return weight, bias


@register_rule
class GroupNormRule(PerExampleRule):
    """`nn.GroupNorm` on (B, C, ...): weight (C,), bias (C,)."""

    layer_type: ClassVar[type[nn.Module]] = nn.GroupNorm
    parameter_names: ClassVar[tuple[str, ...]] = ("weight", "bias")
    autocast: ClassVar = "float32"
    batched: ClassVar[tuple[int, ...]] = (0, 2, 3)
    module: Any  # a GroupNorm, or what is one with other names (`InstanceNormRule`)

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


@register_rule
class InstanceNormRule(GroupNormRule):
    """`nn.InstanceNorm1d/2d/3d` with `affine=True` on (B, C, *space): weight (C,), bias (C,)."""

    layer_type: ClassVar[type[nn.Module]] = _InstanceNorm
    module: _InstanceNorm

    def _groups(self) -> int:
        return self.module.num_features

    def prepare(self, x: Tensor) -> Tensor:
        """The input as it is.

        Raises:
            UserError: an input without a batch, or with one number a channel, of which nothing is left.
        """
        if x.dim() != self.module._get_no_batch_dim() + 1 or x[0, 0].numel() == 1:
            raise UserError(
                f"{type(self.module).__name__} got an input of shape {tuple(x.shape)}: the batch must come first, then "
                "the channels, with more than one number in each."
            )
        return x


def _channel_products(g: Tensor, x: Tensor) -> Tensor:
    """Σ g∘x over space, (B, C), a few examples at a time: a product of full size would only be written to be read."""
    step = max(1, min(len(g), CHUNK_FLOATS // g[0].numel()))
    buffer = torch.empty_like(g[:step])
    space, sums = tuple(range(2, g.dim())), []
    for start in range(0, len(g), step):
        part = slice(start, start + step)
        sums.append(torch.mul(g[part], x[part], out=buffer[: len(g[part])]).sum(space))
    return torch.cat(sums)
