"""Wide residual networks (Zagoruyko & Komodakis 2016) for private training: WRN16-4 of paper section 4.1.

The paper names WRN16-4 with 2.8 M parameters, but not the order of the layers in a block, and orders differ
by up to 8 points of accuracy (arXiv 2508.15141). So the order is a named choice; all were read in code.

`classic`: convolution → norm → ReLU → convolution → norm, ReLU after the sum; a stem of 16·width
    channels with norm and ReLU; a shortcut of sampling, norm and zero channels, only where the stride is 2.
    Source: github.com/dayu11/DP-SGD-Baseline-Opacus at b226e77e, models/wrn.py and models/utils.py. It is
    by the paper's third author, with a recipe near the paper's (300 epochs, clip 1, learning rate
    4). Not verified: that the paper trained it. Differs: we clamp a filter's squared deviation at 1e-4, where
    the source adds 1e-10 to its variance.

`deepmind`: ReLU → norm → convolution twice, with gain and bias; a stem of 16 channels without norm; the first
    block of each stage has the shortcut ReLU → norm → 1×1 convolution; ReLU → norm → mean at the end.
    Source: De et al. (2022), jax_privacy's experiments/image_classification/models/cifar.py and common.py,
    read at 52e9674f (the folder is gone since). Differs: in a convolution of stride 2 we pad one pixel on
    each side, where JAX's "SAME" pads an even image on the far side only.

`order3`: `deepmind` with the shortcut alone the other way round: norm → ReLU → 1×1 convolution.
    Source: order1=3, order2=0 of the network in arXiv 2508.15141's code, new_wide_resnet.py of
    github.com/wenxuan-Bao/Reliable-and-Generalizable-DPML at 4b0f96a2, which has it from
    src/models/wideresnet.py of github.com/facebookresearch/tan at 1d235ae6. There 0 is DeepMind's order and
    1 is called classic: norm → ReLU → convolution throughout with a convolution for shortcut, so the
    65.74 % it reports is not our `classic`'s. Not verified: that the article's "order 3" is number 3 of its
    code, and whether it standardised weights (its scripts import a plain network and a standardised one by
    turns). Differs: the source has no gain.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from groupwise.errors import UserError
from groupwise.models.blocks import ClassicBlock, PreactivationBlock, UnitVarianceConv, preactivation_conv
from groupwise.models.normalization import NORMS, make_norm

BLOCK_ORDERS = ("classic", "deepmind", "order3")
STEM_CHANNELS = 16


class WideResNet(nn.Module):
    """A wide residual network: images (B, in_channels, H, W), H and W at least 8, to logits (B, num_classes).

    Build it with `wide_resnet`. `blocks` holds the residual blocks in order: the groups of block clipping.
    """

    def __init__(
        self,
        *,
        depth: int,
        width: int,
        num_classes: int,
        in_channels: int,
        block_order: str,
        norm: str,
        norm_groups: int,
        weight_standardization: bool,
    ) -> None:
        super().__init__()
        self.classic = block_order == "classic"
        blocks_per_stage = (depth - 4) // 6
        common: dict[str, Any] = {
            "norm": norm,
            "norm_groups": norm_groups,
            "weight_standardization": weight_standardization,
        }
        if self.classic:
            channels = 16 * width
            self.stem: nn.Module = UnitVarianceConv(
                in_channels, channels, 1, weight_standardization=weight_standardization
            )
            self.stem_norm = make_norm(norm, channels, norm_groups)
        else:
            channels = STEM_CHANNELS
            self.stem = preactivation_conv(in_channels, channels, 3, 1, weight_standardization)
        blocks: list[nn.Module] = []
        for stage, stage_channels in enumerate((16 * width, 32 * width, 64 * width)):
            for index in range(blocks_per_stage):
                stride = 2 if stage > 0 and index == 0 else 1
                if self.classic:
                    block: nn.Module = ClassicBlock(channels, stage_channels, stride, **common)
                else:
                    block = PreactivationBlock(
                        channels,
                        stage_channels,
                        stride,
                        project=index == 0,
                        norm_first_shortcut=block_order == "order3",
                        stem=not blocks,
                        **common,
                    )
                blocks.append(block)
                channels = stage_channels
        self.blocks = nn.Sequential(*blocks)
        self.final_norm = None if self.classic else make_norm(norm, channels, norm_groups)
        self.classifier = nn.Linear(channels, num_classes)
        if not self.classic:
            _init_classifier(self.classifier)

    def forward(self, images: Tensor) -> Tensor:
        """Classify images (B, in_channels, H, W): logits (B, num_classes)."""
        hidden = self.stem(images)
        if self.final_norm is None:
            hidden = self.blocks(F.relu(self.stem_norm(hidden)))
        else:
            hidden = self.final_norm(F.relu(self.blocks(hidden)))
        return self.classifier(torch.mean(hidden, dim=(2, 3)))


def _init_classifier(classifier: nn.Linear) -> None:
    """Draw weights of variance 1/fan_in from a normal cut at two standard deviations, as De et al. do."""
    std = classifier.in_features**-0.5 / 0.8796  # 0.8796: what the cut leaves of the standard deviation
    nn.init.trunc_normal_(classifier.weight, std=std, a=-2 * std, b=2 * std)
    nn.init.zeros_(classifier.bias)


def wide_resnet(
    *,
    depth: int = 16,
    width: int = 4,
    num_classes: int = 10,
    in_channels: int = 3,
    block_order: str = "deepmind",
    norm: str = "group",
    norm_groups: int = 16,
    weight_standardization: bool = True,
) -> WideResNet:
    """Build a wide residual network WRN-depth-width with fresh weights from torch's global generator.

    Args:
        depth: 6n + 4 with n >= 1 blocks in each of three stages (10, 16, 22, ...).
        width: factor on the stages' 16, 32 and 64 channels.
        num_classes: length of the logits.
        in_channels: channels of the images.
        block_order: "classic", "deepmind" or "order3"; see the module.
        norm: "group", or "batch" for the non-private baseline.
        norm_groups: groups of each GroupNorm, less where channels are few; see `normalization.group_count`.
        weight_standardization: standardise the filters of every convolution.

    Raises:
        UserError: an argument is out of its range; the message says which and what it may be.
    """
    _check_choice("block_order", block_order, BLOCK_ORDERS)
    _check_choice("norm", norm, NORMS)
    if depth < 10 or (depth - 4) % 6:
        raise UserError(f"depth={depth} was given, but a wide ResNet has depth 6n + 4; use 10, 16, 22, 28 or 40.")
    counts = {
        "width": width,
        "num_classes": num_classes,
        "in_channels": in_channels,
        "norm_groups": norm_groups,
    }
    for name, value in counts.items():
        if value < 1:
            raise UserError(f"{name}={value} was given, but it counts something; use a whole number of at least 1.")
    return WideResNet(
        depth=depth,
        width=width,
        num_classes=num_classes,
        in_channels=in_channels,
        block_order=block_order,
        norm=norm,
        norm_groups=norm_groups,
        weight_standardization=weight_standardization,
    )


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise UserError(f"{name}={value!r} was given, but it is one of {', '.join(choices)}.")
