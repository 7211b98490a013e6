"""Labelled images in memory, and the one call that loads them."""

from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from groupwise.data.place import place_of
from groupwise.errors import UserError

DATASETS = ("cifar10", "digits")


@dataclass(frozen=True)
class ImageData:
    """A data set in memory.

    Attributes:
        x_train: images (N, C, H, W), uint8.
        y_train: labels (N,), int64, in 0..num_classes - 1.
        x_test: images (M, C, H, W), uint8.
        y_test: labels (M,), int64.
        num_classes: number of classes.
        source: where it was found, in words.
        sha256: SHA-256 in hex of each file that was read, by its path under the root.
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


def load_images(name: str, root: Path, download: bool = True, image_size: int | None = None) -> ImageData:
    """Load a data set by name, scaled down where `image_size` asks for it.

    Args:
        name: "cifar10" (three layouts under `root`, see `cifar10`) or "digits" (comes with scikit-learn).
        root: folder of the data; for CIFAR-10 an .npz file too. The digits do not look at it.
        download: fetch CIFAR-10 into `root` when it is not there.
        image_size: average blocks of pixels down to this height and width; None keeps the images.

    Raises:
        UserError: an unknown name, missing or broken data, or a size that does not divide the images'.
    """
    if name == "cifar10":
        from groupwise.data.cifar10 import load_cifar10

        data = load_cifar10(Path(root), download=download)
    elif name == "digits":
        from groupwise.data.digits import load_digits

        data = load_digits()
    else:
        raise UserError(f"data set {name!r} is not known; choose one of {', '.join(DATASETS)}.")
    if image_size is None or image_size == data.image_size:
        return data
    if image_size < 1 or data.image_size % image_size:
        raise UserError(
            f"image_size={image_size} was given, but the images of {data.source} have {data.image_size} "
            f"pixels a side; use a divisor of {data.image_size}."
        )
    return replace(data, x_train=average_pool(data.x_train, image_size), x_test=average_pool(data.x_test, image_size))


def hold_out(data: ImageData, share: float, key: int = 0) -> ImageData:
    """Set about a `share` of the training images aside, and validate on them in the place of the test set; for tuning.

    Each goes by a hash of its own pixels and the public `key`: no image decides on which side another one is, equal
    images are on one side, and what remains keeps its order.

    Raises:
        UserError: a share that leaves one of the two sides empty.
    """
    count = len(data.x_train)
    places = torch.tensor([place_of(image.tobytes(), key) for image in data.x_train.numpy()], dtype=torch.float64)
    held = places < share
    if not 0 < (wanted := int(held.sum())) < count:
        raise UserError(f"data.holdout={share} of {count} training images leaves one side empty; give 0.2, say.")
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
    # In pieces: as float32 all of CIFAR-10 would take another 0.6 GB.
    pooled = [F.avg_pool2d(piece.float(), kernel).round().to(torch.uint8) for piece in images.split(4096)]
    return torch.cat(pooled)
