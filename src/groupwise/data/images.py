"""Labelled images in memory, split for tuning, and normalised by public constants."""

from dataclasses import dataclass, field, replace
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from groupwise.data.text_examples import keyed_fraction
from groupwise.errors import UserError


@dataclass(frozen=True)
class ImageData:
    """A data set in memory.

    Attributes:
        x_train: images (N, C, H, W), uint8; or features of them, float16.
        y_train: labels (N,), int64, in 0..num_classes - 1.
        x_test: the same for validation, (M, C, H, W).
        y_test: labels (M,), int64.
        source: where it was found, for the record.
        sha256: SHA-256 in hex of each file that was read, by its path below the root.
    """

    x_train: Tensor
    y_train: Tensor
    x_test: Tensor
    y_test: Tensor
    num_classes: int
    source: str
    sha256: dict[str, str] = field(default_factory=dict)

    @property
    def image_size(self) -> int:
        """Height and width of an image, in pixels."""
        return self.x_train.shape[-1]

    @property
    def channels(self) -> int:
        """Channels of an image."""
        return self.x_train.shape[1]


def hold_out(data: ImageData, share: float, key: int = 0) -> ImageData:
    """Hold out about a `share` of the training images, and validate on them in place of the test set; for tuning.

    An image is held out or not by a hash of its own pixels and the public `key`. So no image affects the choice of
    another one, and equal images are chosen together. The remaining images keep their order.

    Raises:
        UserError: a share that leaves one of the two sets empty.
    """
    count = len(data.x_train)
    places = torch.tensor([keyed_fraction(image.tobytes(), key) for image in data.x_train.numpy()], dtype=torch.float64)
    held = places < share
    if not 0 < (wanted := int(held.sum())) < count:
        raise UserError(
            f"data.holdout={share} of {count} training images leaves one set empty; give a share such as 0.2."
        )
    return replace(
        data,
        x_train=data.x_train[~held],
        y_train=data.y_train[~held],
        x_test=data.x_train[held],
        y_test=data.y_train[held],
        source=f"{data.source}; {wanted:,} of {count:,} training images held out to validate on (key {key})",
    )


def average_pool(images: Tensor, image_size: int) -> Tensor:
    """Average square blocks of pixels: uint8 (N, C, H, H) to uint8 (N, C, image_size, image_size)."""
    kernel = images.shape[-1] // image_size
    # In pieces, because all of CIFAR-10 in float32 would take another 0.6 GB.
    pooled = [F.avg_pool2d(piece.float(), kernel).round().to(torch.uint8) for piece in images.split(4096)]
    return torch.cat(pooled)


ChannelStatistics = tuple[tuple[float, ...], tuple[float, ...]]

# CIFAR-10: the published values, used by jax_privacy's experiments. Digits: centre and half of the range.
_STATISTICS: dict[str, ChannelStatistics] = {
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "digits": ((0.5,), (0.5,)),
}


def channel_statistics(name: str) -> ChannelStatistics:
    """Return the public (mean, std) of a data set for each channel, for intensities in [0, 1].

    They are constants, never computed from the data that are loaded. CIFAR-10's are the published mean and
    standard deviation of its training images, which others computed from those images without noise. Like De
    et al. (2022) we treat them as public; no epsilon covers them. The 0.5 of the digits depends on no data.
    """
    return _STATISTICS[name]


def normalize(images: Tensor, mean: tuple[float, ...], std: tuple[float, ...]) -> Tensor:
    """Scale images (N, C, H, W) of uint8 to float32: (x/255 - mean)/std, channel by channel."""
    centre, spread = _scales(mean, std, images.device)
    return (images - centre) / spread


@lru_cache(maxsize=16)
def _scales(mean: tuple[float, ...], std: tuple[float, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """255·mean and 255·std, (1, C, 1, 1), on the device; cached, because each copy would synchronise."""
    centre, spread = (
        torch.tensor(values, dtype=torch.float32).to(device).view(1, -1, 1, 1) * 255 for values in (mean, std)
    )
    return centre, spread
