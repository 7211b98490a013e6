"""Makes the networks for images: wide residual networks, and a small one on scattering features."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from groupwise.clipping import WSConv2d
from groupwise.errors import UserError


def group_count(channels: int, norm_groups: int, *, stem: bool = False) -> int:
    """Choose the groups of a GroupNorm: `norm_groups`, but never so many that a group is a single channel.

    A group of one channel subtracts each channel's own mean. Before a global average pooling only the bias
    would remain, and the network would be constant. So the count is the largest divisor of `channels` that is
    at most min(norm_groups, channels // 2).

    Args:
        norm_groups: the number of groups asked for (16 in De et al.).
        stem: the input is the 16-channel first convolution, which De et al. normalise in 16 groups of one
            channel. There the bound is min(norm_groups, channels), as in the published network.
    """
    bound = max(1, min(norm_groups, channels if stem else channels // 2))
    return max(count for count in range(1, bound + 1) if channels % count == 0)


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
    """Two rounds of ReLU → norm → 3×3 convolution beside a shortcut, as in De et al.'s code.

    Where `project` is set (the first block of a stage) the shortcut is ReLU → norm of its own → 1×1 convolution.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        stride: int,
        *,
        project: bool,
        norm_groups: int,
        weight_standardization: bool,
        stem: bool,
    ) -> None:
        super().__init__()
        self.shortcut_norm = self.shortcut_conv = None
        if project:
            self.shortcut_norm = nn.GroupNorm(group_count(in_channels, norm_groups, stem=stem), in_channels)
            self.shortcut_conv = preactivation_conv(in_channels, out_channels, 1, stride, weight_standardization)
        self.norm1 = nn.GroupNorm(group_count(in_channels, norm_groups, stem=stem), in_channels)
        self.conv1 = preactivation_conv(in_channels, out_channels, 3, stride, weight_standardization)
        self.norm2 = nn.GroupNorm(group_count(out_channels, norm_groups), out_channels)
        self.conv2 = preactivation_conv(out_channels, out_channels, 3, 1, weight_standardization)

    def forward(self, x: Tensor) -> Tensor:
        """Map x (B, in_channels, H, W) to (B, out_channels, ⌈H/stride⌉, ⌈W/stride⌉)."""
        activated = F.relu(x)
        shortcut = x
        if self.shortcut_conv is not None and self.shortcut_norm is not None:
            shortcut = self.shortcut_conv(self.shortcut_norm(activated))
        hidden = self.conv1(self.norm1(activated))
        return shortcut + self.conv2(self.norm2(F.relu(hidden)))


STEM_CHANNELS = 16


class WideResNet(nn.Module):
    """A wide residual network: images (B, in_channels, H, W), H and W at least 8, to logits (B, num_classes).

    Its weights are fresh, from torch's global generator. `blocks` holds the residual blocks in order: the groups of
    block clipping.

    Args:
        depth: 6n + 4 with n >= 1 blocks in each of three stages (10, 16, 22, ...).
        width: factor on the stages' 16, 32 and 64 channels.
        norm_groups: groups of each GroupNorm; fewer if there are few channels, see `group_count`.

    Raises:
        UserError: a depth that is not 6n + 4.
    """

    def __init__(
        self,
        *,
        depth: int = 16,
        width: int = 4,
        num_classes: int = 10,
        in_channels: int = 3,
        norm_groups: int = 16,
        weight_standardization: bool = True,
    ) -> None:
        super().__init__()
        if depth < 10 or (depth - 4) % 6:
            raise UserError(f"depth={depth} was given, but a wide ResNet has depth 6n + 4; use 10, 16, 22, 28 or 40.")
        common: dict[str, Any] = {"norm_groups": norm_groups, "weight_standardization": weight_standardization}
        channels = STEM_CHANNELS
        self.stem = preactivation_conv(in_channels, channels, 3, 1, weight_standardization)
        blocks: list[nn.Module] = []
        for stage, stage_channels in enumerate((16 * width, 32 * width, 64 * width)):
            for index in range((depth - 4) // 6):
                stride = 2 if stage > 0 and index == 0 else 1
                blocks.append(
                    PreactivationBlock(channels, stage_channels, stride, project=index == 0, stem=not blocks, **common)
                )
                channels = stage_channels
        self.blocks = nn.Sequential(*blocks)
        self.final_norm = nn.GroupNorm(group_count(channels, norm_groups), channels)
        self.classifier = nn.Linear(channels, num_classes)
        std = channels**-0.5 / 0.8796  # truncation multiplies the standard deviation by 0.8796
        nn.init.trunc_normal_(self.classifier.weight, std=std, a=-2 * std, b=2 * std)  # variance 1/channels
        nn.init.zeros_(self.classifier.bias)

    def forward(self, images: Tensor) -> Tensor:
        """Classify images (B, in_channels, H, W): logits (B, num_classes)."""
        hidden = self.final_norm(F.relu(self.blocks(self.stem(images))))
        return self.classifier(torch.mean(hidden, dim=(2, 3)))


HIDDEN = 64


def scatter_cnn(num_classes: int, in_channels: int, side: int, norm_groups: int = 27) -> nn.Module:
    """Two convolutions with tanh on normalised features (Tramèr and Boneh's table 8; 187,210 weights on CIFAR-10).

    Args:
        in_channels: features per position, 243 on CIFAR-10. The features of each example are normalised in groups,
            without trainable parameters.
        side: height and width of the features, 8 on CIFAR-10.
        norm_groups: groups of that normalisation, a divisor of `in_channels`.

    Raises:
        UserError: groups that do not divide the channels.
    """
    if norm_groups < 1 or in_channels % norm_groups:
        raise UserError(f"model.norm_groups={norm_groups} does not divide the {in_channels} channels: give a divisor.")
    return nn.Sequential(
        nn.GroupNorm(norm_groups, in_channels, affine=False),
        nn.Conv2d(in_channels, HIDDEN, 3, padding=1),
        nn.Tanh(),
        nn.MaxPool2d(2),
        nn.Conv2d(HIDDEN, HIDDEN, 3, padding=1),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(HIDDEN * (side // 2) ** 2, num_classes),
    )
