"""Loads labelled images by name: CIFAR-10, or the 1,797 handwritten digits in scikit-learn."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from groupwise.data.cifar10 import load_cifar10
from groupwise.data.images import ImageData, average_pool
from groupwise.data.text_examples import sha256_of_bytes
from groupwise.errors import UserError

DATASETS = ("cifar10", "digits")
MAX_INTENSITY = 16
TEST_EVERY = 5


def load_digits() -> ImageData:
    """Load the UCI digits: 8×8 grey images in 10 classes; every fifth image of a class is in the test set.

    Intensities 0..16 become 0..255. The split is fixed and stratified: the examples 0, 5, 10, ... of each class, in
    scikit-learn's order, are for testing (1,433 for training, 364 for testing). The SHA-256 is that of the decoded
    arrays, not of scikit-learn's file.
    """
    from sklearn.datasets import load_digits as read

    bunch = read()
    images = np.rint(bunch.images * (255 / MAX_INTENSITY)).astype(np.uint8)[:, None]
    labels = bunch.target.astype(np.int64)
    is_test = np.zeros(len(labels), dtype=bool)
    for digit in range(10):
        is_test[np.flatnonzero(labels == digit)[::TEST_EVERY]] = True
    return ImageData(
        x_train=torch.from_numpy(images[~is_test]),
        y_train=torch.from_numpy(labels[~is_test]),
        x_test=torch.from_numpy(images[is_test]),
        y_test=torch.from_numpy(labels[is_test]),
        num_classes=10,
        source="the digits of scikit-learn",
        sha256={"sklearn.datasets.load_digits": sha256_of_bytes(images.tobytes(), labels.astype("<i8").tobytes())},
    )


def load_images(name: str, root: Path, image_size: int | None = None) -> ImageData:
    """Load a data set by name, scaled down to `image_size` if that is given.

    Args:
        name: "cifar10" (two layouts below `root`, see `load_cifar10`) or "digits" (in scikit-learn).
        root: folder of the data, into which CIFAR-10 is downloaded if it is missing; not used for the digits.
        image_size: height and width to which the images are reduced by averaging blocks of pixels; None keeps them.

    Raises:
        UserError: an unknown name, missing or broken data, or a size that does not divide the image size.
    """
    if name == "cifar10":
        data = load_cifar10(Path(root))
    elif name == "digits":
        data = load_digits()
    else:
        raise UserError(f"data set {name!r} is not known; choose one of {', '.join(DATASETS)}.")
    if image_size is None or image_size == data.image_size:
        return data
    if image_size < 1 or data.image_size % image_size:
        raise UserError(f"image_size={image_size} is no divisor of {data.image_size}, the images' width; give one.")
    return replace(data, x_train=average_pool(data.x_train, image_size), x_test=average_pool(data.x_test, image_size))
