"""EfficientNet-Lite0 (Tan and Le 2019, without squeeze-and-excitation), up to its features, with published weights."""

import torch.nn.functional as F
from torch import Tensor, nn

from groupwise.errors import UserError
from groupwise.models.hub import find_source

SOURCE = "pretrained/efficientnet_lite0"
FEATURES = 1280
PIXELS = 112
"""Side that images are enlarged to. The network was trained at 224; 112 takes a quarter of the time."""
STAGES = ((1, 3, 1, 1, 32, 16), (2, 3, 2, 6, 16, 24), (2, 5, 2, 6, 24, 40), (3, 3, 2, 6, 40, 80), (3, 5, 1, 6, 80, 112),
          (4, 5, 2, 6, 112, 192), (1, 3, 1, 6, 192, 320))  # fmt: skip
"""Blocks, kernel, stride of the first block, expansion, channels in and out."""


class SameConv(nn.Conv2d):
    """A convolution without bias that pads as TensorFlow's "SAME" does: more at the end than at the beginning."""

    def __init__(self, channels: int, out: int, kernel: int, stride: int = 1, groups: int = 1) -> None:
        super().__init__(channels, out, kernel, stride, groups=groups, bias=False)

    def forward(self, images: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, C', ceil(H/stride), ceil(W/stride))."""
        padding: list[int] = []
        for size, kernel, stride in zip(images.shape[-2:], self.kernel_size, self.stride, strict=True):
            total = max((-(-size // stride) - 1) * stride + kernel - size, 0)
            padding = [total // 2, total - total // 2, *padding]
        return super().forward(F.pad(images, padding))


def _norm(channels: int) -> nn.BatchNorm2d:
    return nn.BatchNorm2d(channels, eps=1e-3)


class Block(nn.Module):
    """Expansion, depthwise convolution and projection, with a shortcut where the shapes allow it."""

    def __init__(self, kernel: int, stride: int, expansion: int, channels: int, out: int) -> None:
        super().__init__()
        middle = channels * expansion
        self.shortcut = stride == 1 and channels == out
        if expansion > 1:
            self._expand_conv, self._bn0 = SameConv(channels, middle, 1), _norm(middle)
        self._depthwise_conv, self._bn1 = SameConv(middle, middle, kernel, stride, middle), _norm(middle)
        self._project_conv, self._bn2 = SameConv(middle, out, 1), _norm(out)

    def forward(self, images: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, C', H', W')."""
        wide = F.relu6(self._bn0(self._expand_conv(images))) if hasattr(self, "_expand_conv") else images
        narrow: Tensor = self._bn2(self._project_conv(F.relu6(self._bn1(self._depthwise_conv(wide)))))
        return images + narrow if self.shortcut else narrow


class Lite0Features(nn.Module):
    """Images (B, 3, H, W), normalised -> features (B, 1280, 1, 1); names are those of the published weights."""

    def __init__(self) -> None:
        super().__init__()
        self._conv_stem, self._bn0 = SameConv(3, 32, 3, 2), _norm(32)
        blocks = [
            Block(kernel, stride if first else 1, expansion, channels if first else out, out)
            for count, kernel, stride, expansion, channels, out in STAGES
            for first in (True, *[False] * (count - 1))
        ]
        self._blocks = nn.Sequential(*blocks)
        self._conv_head, self._bn1 = SameConv(320, FEATURES, 1), _norm(FEATURES)

    def forward(self, images: Tensor) -> Tensor:
        """The mean of the last activations over all positions."""
        states = self._blocks(F.relu6(self._bn0(self._conv_stem(images))))
        return F.relu6(self._bn1(self._conv_head(states))).mean((2, 3), keepdim=True)


def normalised(images: Tensor) -> Tensor:
    """uint8 (B, 3, H, W) to the float32 that the network was trained on."""
    return (images / 255 - 0.498) / 0.502


def load_lite0() -> nn.Module:
    """The network with its weights, in eval mode; raises `UserError` if they have not been fetched."""
    from safetensors.torch import load_file

    path = f"{find_source(SOURCE)}/model.safetensors"
    try:
        weights = load_file(path)
    except OSError as error:
        raise UserError(
            f"model=lite0_head needs {SOURCE}: fetch it with `python -m groupwise.models.published efficientnet_lite0`."
        ) from error
    network = Lite0Features()
    network.load_state_dict({name: value for name, value in weights.items() if not name.startswith("_fc.")})
    return network.eval()


def lite0_head(num_classes: int) -> nn.Module:
    """A head of two linear layers, 330,000 weights: features (B, 1280, 1, 1) -> logits (B, num_classes).

    The features of each example are normalised first, without trainable parameters.
    """
    return nn.Sequential(
        nn.Flatten(),
        nn.LayerNorm(FEATURES, elementwise_affine=False),
        nn.Linear(FEATURES, HIDDEN),
        nn.ReLU(),
        nn.Linear(HIDDEN, num_classes),
    )


HIDDEN = 256
