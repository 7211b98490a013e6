"""Turns images into scattering features, fixed functions of one image each, and keeps them on disk.

Wavelet scattering (Mallat 2012; kymatio) of depth J = 2 with 8 angles has no weights and sees one image at a time, so a
model trained privately on the features is private in the images. Tramèr and Boneh (2021) trained small networks so.
"""

import hashlib
from dataclasses import replace
from io import BufferedRandom

import numpy as np
import torch
from torch import Tensor

from groupwise.atomic import write_atomically
from groupwise.cache import cache_folder
from groupwise.data.images import ImageData
from groupwise.errors import UserError

SCALE = 2
"""J: features are at 1/2^J of the pixels' resolution."""
COEFFICIENTS = 81
"""A channel's: 1 + 8 J + 64 J (J - 1) / 2."""
PIECE = 500
"""Images that are transformed together."""


def scattering(data: ImageData) -> ImageData:
    """The data set with features (N, 81·C, H/4, H/4) of float16 in the place of images, in [0, 1] as the pixels are.

    Computed once, some 6 ms an image of 32×32 pixels, and then read from the cache folder, where they lie by SHA-256.

    Raises:
        UserError: kymatio is not installed, or the images' side is no multiple of 4 pixels, at least 8.
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
        pass  # not there, or broken: made anew
    features = _transform(images, shape, split)

    def write(file: BufferedRandom) -> None:
        np.save(file, features.numpy())

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, write)
    except OSError:
        pass  # a cache that cannot be written costs time alone
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
