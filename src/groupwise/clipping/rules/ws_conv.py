"""A convolution whose filters are standardised before use; `computed_weight.py` clips it."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

STANDARDIZATION_EPS = 1e-4


def standardize_weight(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Give each output filter mean 0 and squared norm 1; a summed squared deviation counts as 1e-4 at least.

    Args:
        weight: filters (p, ...); statistics are taken over all axes but the first.

    Returns:
        The standardised weight (same shape) and the scale of each filter, (p, 1, ...).
    """
    centred = weight - weight.mean(dim=tuple(range(1, weight.dim())), keepdim=True)
    scale = centred.square().sum(dim=tuple(range(1, weight.dim())), keepdim=True).clamp_min(STANDARDIZATION_EPS).rsqrt()
    return centred * scale, scale


class WSConv2d(nn.Conv2d):
    """`nn.Conv2d` whose filters are standardised to mean 0 and norm 1 before use (Qiao et al. 2019).

    De et al. (2022) train WRN16-4 with it; the paper follows them (section 4.1).

    Args:
        gain: learn a factor for each output channel, as De et al. do; the rest are `nn.Conv2d`'s arguments.
    """

    gain: nn.Parameter | None

    def __init__(self, *args: Any, gain: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.padding_mode != "zeros":
            raise ValueError(f"WSConv2d pads with zeros only; padding_mode={self.padding_mode!r} was given.")
        self.register_parameter("gain", nn.Parameter(torch.ones(self.out_channels)) if gain else None)

    def forward(self, x: Tensor) -> Tensor:
        """Convolve x (B, c, H, W) with the standardised filters: (B, p, H', W')."""
        weight, _ = standardize_weight(self.weight)
        if self.gain is not None:
            weight = weight * self.gain.view(-1, 1, 1, 1)
        return F.conv2d(x, weight, self.bias, self.stride, self.padding, self.dilation, self.groups)
