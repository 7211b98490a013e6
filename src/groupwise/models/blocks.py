"""The residual blocks of the three block orders; `wide_resnet` tells their sources."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from groupwise.clipping import WSConv2d
from groupwise.models.normalization import make_norm


def preactivation_conv(
    in_channels: int, out_channels: int, kernel_size: int, stride: int, weight_standardization: bool
) -> nn.Conv2d:
    """Make a convolution as De et al. do: bias 0, a gain of 1 if standardised, weights N(0, 1/fan_in)."""
    shape = (in_channels, out_channels, kernel_size, stride, kernel_size // 2)
    conv = WSConv2d(*shape, gain=True) if weight_standardization else nn.Conv2d(*shape)
    nn.init.normal_(conv.weight, std=1 / math.sqrt(in_channels * kernel_size**2))
    if conv.bias is not None:
        nn.init.zeros_(conv.bias)
    return conv


class PreactivationBlock(nn.Module):
    """Two rounds of ReLU → norm → 3×3 convolution beside a shortcut: the `deepmind` and `order3` blocks.

    Where `project` is set (the first block of a stage) the shortcut is a 1×1 convolution of its own
    normalisation: ReLU → norm → convolution, or norm → ReLU → convolution with `norm_first_shortcut`.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        stride: int,
        *,
        project: bool,
        norm_first_shortcut: bool,
        norm: str,
        norm_groups: int,
        weight_standardization: bool,
        stem: bool,
    ) -> None:
        super().__init__()
        self.norm_first_shortcut = norm_first_shortcut
        self.shortcut_norm = self.shortcut_conv = None
        if project:
            self.shortcut_norm = make_norm(norm, in_channels, norm_groups, stem=stem)
            self.shortcut_conv = preactivation_conv(in_channels, out_channels, 1, stride, weight_standardization)
        self.norm1 = make_norm(norm, in_channels, norm_groups, stem=stem)
        self.conv1 = preactivation_conv(in_channels, out_channels, 3, stride, weight_standardization)
        self.norm2 = make_norm(norm, out_channels, norm_groups)
        self.conv2 = preactivation_conv(out_channels, out_channels, 3, 1, weight_standardization)

    def forward(self, x: Tensor) -> Tensor:
        """Map x (B, in_channels, H, W) to (B, out_channels, ⌈H/stride⌉, ⌈W/stride⌉)."""
        activated = F.relu(x)
        shortcut = x
        if self.shortcut_conv is not None and self.shortcut_norm is not None:
            inner = F.relu(self.shortcut_norm(x)) if self.norm_first_shortcut else self.shortcut_norm(activated)
            shortcut = self.shortcut_conv(inner)
        hidden = self.conv1(self.norm1(activated))
        return shortcut + self.conv2(self.norm2(F.relu(hidden)))


class UnitVarianceConv(nn.Module):
    """A convolution as Yu's baseline makes it: filters standardised to variance 1, weights N(0, 2/fan_out).

    `WSConv2d` gives filters of norm 1, so its input is multiplied by √fan_in here. The normalisation that
    follows cancels the factor in the forward pass, but not in the gradient of the bias, and that one counts
    in the norm which is clipped.
    """

    def __init__(self, in_channels: int, out_channels: int, stride: int, *, weight_standardization: bool) -> None:
        super().__init__()
        kind = WSConv2d if weight_standardization else nn.Conv2d
        self.conv = kind(in_channels, out_channels, 3, stride, 1)
        self.input_scale = math.sqrt(9 * in_channels) if weight_standardization else 1.0
        nn.init.normal_(self.conv.weight, std=math.sqrt(2 / (9 * out_channels)))

    def forward(self, x: Tensor) -> Tensor:
        """Convolve x (B, in_channels, H, W) to (B, out_channels, ⌈H/stride⌉, ⌈W/stride⌉)."""
        return self.conv(x if self.input_scale == 1.0 else x * self.input_scale)


class ClassicBlock(nn.Module):
    """Convolution → norm → ReLU → convolution → norm, plus the shortcut, then ReLU: the `classic` block.

    A block with stride 2 doubles the channels; its shortcut takes every second pixel, normalises and fills
    the new channels with zeros. It has no convolution.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        stride: int,
        *,
        norm: str,
        norm_groups: int,
        weight_standardization: bool,
    ) -> None:
        super().__init__()
        self.conv1 = UnitVarianceConv(in_channels, out_channels, stride, weight_standardization=weight_standardization)
        self.norm1 = make_norm(norm, out_channels, norm_groups)
        self.conv2 = UnitVarianceConv(out_channels, out_channels, 1, weight_standardization=weight_standardization)
        self.norm2 = make_norm(norm, out_channels, norm_groups)
        # The source's average pooling has kernel 1: it samples and does not average.
        self.shortcut_pool = nn.AvgPool2d(1, stride=stride) if stride != 1 else None
        self.shortcut_norm = make_norm(norm, in_channels, norm_groups) if stride != 1 else None

    def forward(self, x: Tensor) -> Tensor:
        """Map x (B, in_channels, H, W) to (B, out_channels, ⌈H/stride⌉, ⌈W/stride⌉)."""
        hidden = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        shortcut = x
        if self.shortcut_pool is not None and self.shortcut_norm is not None:
            shortcut = self.shortcut_norm(self.shortcut_pool(x))
            shortcut = torch.cat((shortcut, torch.zeros_like(shortcut)), dim=1)
        return F.relu(hidden + shortcut)
