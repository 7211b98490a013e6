"""InstanceNorm: a GroupNorm of one channel a group; with running statistics it mixes examples, and is refused."""

from typing import ClassVar

from torch import Tensor, nn
from torch.nn.modules.instancenorm import _InstanceNorm

from groupwise.clipping.rules.base import register_rule
from groupwise.clipping.rules.group_norm import GroupNormRule
from groupwise.errors import UserError


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
