"""Replaces images by fixed features, which are computed once and cached on disk.

The features of an image depend on that image alone. So private training on the features protects the images too.
Wavelet scattering (Mallat 2012; kymatio) of depth J = 2 with 8 angles has no weights; Tramèr and Boneh (2021)
trained small networks on it. EfficientNet-Lite0's weights were trained on ImageNet, so they count as public.
"""

import hashlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from groupwise.atomic import write_atomically
from groupwise.cache import cache_folder
from groupwise.data.images import ImageData
from groupwise.errors import UserError
from groupwise.models.efficientnet import FEATURES, PIXELS, load_lite0, normalised

SCALE = 2
"""J: scattering features are at 1/2^J of the pixels' resolution."""
COEFFICIENTS = 81
"""Scattering features per channel: 1 + 8 J + 64 J (J - 1) / 2."""
PIECE = 500
"""How many images are transformed at once."""


def scattering(data: ImageData) -> ImageData:
    """The data set with features (N, 81·C, H/4, H/4) of float16 in place of its images, scaled to [0, 1].

    They take about 6 ms per image of 32×32 pixels.

    Raises:
        UserError: kymatio is not installed, or the images' side is not a multiple of 4 pixels, at least 8.
    """
    side = data.image_size
    if side < 8 or side % 2**SCALE:
        raise UserError(f"The images are {side} pixels wide, but scattering needs 8, 12, 16, ...: set data.image_size.")
    shape = (COEFFICIENTS * data.channels, side // 2**SCALE, side // 2**SCALE)

    def make() -> Callable[[Tensor], Tensor]:
        try:
            from kymatio.scattering2d.frontend.torch_frontend import ScatteringTorch2D
        except ImportError as error:
            raise UserError("model=scatter_cnn needs the package kymatio: pip install kymatio.") from error
        transform = ScatteringTorch2D(J=SCALE, shape=(side, side))
        return lambda images: transform(images.float().div(255).contiguous()).flatten(1, 2)

    return _replaced(data, f"scattering J={SCALE}", shape, make, f"scattering features (J = {SCALE})")


def lite0(data: ImageData) -> ImageData:
    """The data set with EfficientNet-Lite0's last features (N, 1280, 1, 1) of float16 in place of its images.

    Images are enlarged to 112×112 pixels first; they take about 6 ms each.

    Raises:
        UserError: the weights are missing, or the images are grey.
    """
    if data.channels != 3:
        raise UserError(
            f"EfficientNet-Lite0 needs 3 channels, but {data.source} has {data.channels}: give data.name=cifar10."
        )

    def make() -> Callable[[Tensor], Tensor]:
        network = load_lite0()
        return lambda images: network(
            F.interpolate(normalised(images), (PIXELS, PIXELS), mode="bilinear", antialias=True, align_corners=False)
        )

    return _replaced(data, f"efficientnet_lite0 {PIXELS}", (FEATURES, 1, 1), make, "features of EfficientNet-Lite0")


FEATURES_OF = {"scatter_cnn": scattering, "lite0_head": lite0}
"""model.name -> the function that replaces its images by features."""


def _replaced(
    data: ImageData, name: str, shape: tuple[int, ...], make: Callable[[], Callable[[Tensor], Tensor]], words: str
) -> ImageData:
    train, test = (_features(images, name, shape, make) for images in (data.x_train, data.x_test))
    return replace(data, x_train=train, x_test=test, source=f"{data.source}; {words}")


@torch.no_grad()
def _features(
    images: Tensor, name: str, shape: tuple[int, ...], make: Callable[[], Callable[[Tensor], Tensor]]
) -> Tensor:
    """Features (N, *shape) of float16, from the cache folder by the SHA-256 of the images, or else computed."""
    from tqdm import tqdm

    digest = hashlib.sha256(f"{name} {tuple(images.shape)} float16".encode())
    digest.update(images.numpy().tobytes())
    path = cache_folder() / name.split()[0] / f"{digest.hexdigest()[:32]}.npy"
    with suppress(OSError, ValueError, TypeError):  # if it is missing or broken, they are computed again
        found = torch.from_numpy(np.load(path, allow_pickle=False))
        if tuple(found.shape) == (len(images), *shape) and found.dtype == torch.float16:
            return found
    transform, features = make(), torch.empty((len(images), *shape), dtype=torch.float16)
    starts = range(0, len(images), PIECE)
    for start in tqdm(starts, desc=f"{name} of {len(images):,} images", unit_scale=PIECE, unit="image", leave=False):
        features[start : start + PIECE] = transform(images[start : start + PIECE]).half()
    with suppress(OSError):  # without a cache the next run computes them again
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, lambda file: np.save(file, features.numpy()))
    return features
