"""Scattering features depend on one image each, are cached on disk, and are recomputed if a cached file is broken."""

from pathlib import Path

import numpy as np
import pytest
import torch

from groupwise.data.image_sets import load_images
from groupwise.data.images import ImageData
from groupwise.errors import UserError
from groupwise.models import image_features


def images(count=3, side=8) -> ImageData:
    pixels = torch.randint(0, 256, (count, 3, side, side), dtype=torch.uint8)
    labels = torch.zeros(count, dtype=torch.int64)
    return ImageData(pixels, labels, pixels[:1], labels[:1], 10, "made up")


def test_features_depend_on_one_image_each(own_cache):
    data = images()
    together = image_features.scattering(data)
    assert together.x_train.shape == (3, 243, 2, 2) and together.x_train.dtype == torch.float16
    assert torch.equal(together.x_train[:1], together.x_test)
    assert "scattering features" in together.source
    # The first coefficient of a channel is its mean, about 0.5 for uniform pixels; all have a similar scale.
    assert 0.3 < float(together.x_train[:, ::81].float().mean()) < 0.7
    assert float(together.x_train.float().abs().max()) <= 1


def test_features_are_computed_once(own_cache, monkeypatch):
    data = images()
    first = image_features.scattering(data)
    monkeypatch.setattr(image_features, "PIECE", None)  # with which nothing can be computed
    assert torch.equal(image_features.scattering(data).x_train, first.x_train)


def test_broken_file_is_recomputed(own_cache):
    data = images()
    first = image_features.scattering(data)
    for path in Path(own_cache, "scattering").glob("*.npy"):
        path.write_bytes(path.read_bytes()[:100])
    assert torch.equal(image_features.scattering(data).x_train, first.x_train)
    for path in Path(own_cache, "scattering").glob("*.npy"):
        np.save(path, np.zeros(3, dtype=np.float16))
    assert torch.equal(image_features.scattering(data).x_train, first.x_train)


def test_sides_not_divisible_by_four_are_refused():
    with pytest.raises(UserError, match="6 pixels wide"):
        image_features.scattering(images(side=6))
    assert load_images("digits", Path()).image_size == 8
