"""Loads labelled images by name: CIFAR-10, or the 1,797 handwritten digits that come with scikit-learn; or features.

The features are fixed functions of single images and are cached on disk. Wavelet scattering (Mallat 2012; kymatio) of
depth J = 2 with 8 angles has no weights, so a model trained privately on the features is private in the images. Tramèr
and Boneh (2021) trained small networks on them.
"""

import hashlib
from dataclasses import replace
from io import BufferedRandom
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from groupwise.atomic import write_atomically
from groupwise.cache import cache_folder
from groupwise.data.cifar10 import load_cifar10
from groupwise.data.images import ImageData, average_pool
from groupwise.data.text_examples import sha256_of_bytes
from groupwise.errors import UserError

DATASETS = ("cifar10", "digits")
MAX_INTENSITY = 16
TEST_EVERY = 5


def load_digits() -> ImageData:
    """Load the UCI digits: 8×8 grey images in 10 classes; every fifth image of a class is in the test set.

    Intensities 0..16 become 0..255. The split is fixed, the same on every machine and stratified: within each
    class the examples 0, 5, 10, ... in scikit-learn's order are for testing (1,433 for training, 364 for
    testing). The fingerprint is of the decoded arrays, not of scikit-learn's file.
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


def load_images(name: str, root: Path, download: bool = True, image_size: int | None = None) -> ImageData:
    """Load a data set by name, scaled down to `image_size` if that is given.

    Args:
        name: "cifar10" (three layouts under `root`, see `cifar10`) or "digits" (comes with scikit-learn).
        root: folder of the data, or an .npz file of CIFAR-10; the digits ignore it.
        download: fetch CIFAR-10 into `root` if it is missing.
        image_size: average blocks of pixels down to this height and width; None keeps the images.

    Raises:
        UserError: an unknown name, missing or broken data, or a size that does not divide the images'.
    """
    if name == "cifar10":
        data = load_cifar10(Path(root), download=download)
    elif name == "digits":
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


SCALE = 2
"""J: features are at 1/2^J of the pixels' resolution."""
COEFFICIENTS = 81
"""Features per channel: 1 + 8 J + 64 J (J - 1) / 2."""
PIECE = 500
"""Images that are transformed together."""


def scattering(data: ImageData) -> ImageData:
    """The data set with features (N, 81·C, H/4, H/4) of float16 in place of its images, scaled to [0, 1].

    Computed once, in about 6 ms per image of 32×32 pixels, then read from the cache folder, by SHA-256 of the images.

    Raises:
        UserError: kymatio is not installed, or the images' side is not a multiple of 4 pixels, at least 8.
    """
    side = data.image_size
    if side < 8 or side % 2**SCALE:
        raise UserError(
            f"The images have {side} pixels a side, but scattering takes 8, 12, 16, ...: leave data.image_size out, or "
            "give a multiple of 4."
        )
    return replace(
        data,
        x_train=_features(data.x_train, "training"),
        x_test=_features(data.x_test, "test"),
        source=f"{data.source}; scattering features (J = {SCALE})",
    )


def _features(images: Tensor, split: str) -> Tensor:
    digest = hashlib.sha256(f"scattering J={SCALE} {tuple(images.shape)} float16".encode())
    digest.update(images.numpy().tobytes())
    path = cache_folder() / "scattering" / f"{digest.hexdigest()[:32]}.npy"
    count, channels, side = images.shape[:3]
    shape = (count, COEFFICIENTS * channels, side // 2**SCALE, side // 2**SCALE)
    try:
        found = torch.from_numpy(np.load(path, allow_pickle=False))
        if tuple(found.shape) == shape and found.dtype == torch.float16:
            return found
    except (OSError, ValueError, TypeError):
        pass  # missing or broken: computed again
    features = _transform(images, shape, split)

    def write(file: BufferedRandom) -> None:
        np.save(file, features.numpy())

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, write)
    except OSError:
        pass  # without a cache it only takes longer
    return features


def _transform(images: Tensor, shape: tuple[int, ...], split: str) -> Tensor:
    try:
        from kymatio.scattering2d.frontend.torch_frontend import ScatteringTorch2D
    except ImportError as error:
        raise UserError("model=scatter_cnn needs the package kymatio: pip install kymatio.") from error
    from tqdm import tqdm

    transform = ScatteringTorch2D(J=SCALE, shape=tuple(images.shape[2:]))
    features = torch.empty(shape, dtype=torch.float16)
    starts = range(0, len(images), PIECE)
    for start in tqdm(starts, desc=f"scattering {split} images", unit_scale=PIECE, unit="image", leave=False):
        piece = transform(images[start : start + PIECE].float().div(255).contiguous())
        features[start : start + PIECE] = piece.flatten(1, 2).half()
    return features
