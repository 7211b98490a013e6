"""What a file may hold."""

from pathlib import Path

import numpy as np
import pytest
import torch

from groupwise.data.images import checked_images, checked_labels
from groupwise.errors import UserError

PATH = Path("folder/file.npz")
IMAGES = torch.zeros(3, 3, 8, 8, dtype=torch.uint8)


def test_channels_come_first():
    images = np.random.default_rng(0).integers(0, 256, (2, 8, 8, 3), dtype=np.uint8)
    tensor = checked_images(images, PATH, "x_train")
    assert tensor.shape == (2, 3, 8, 8)
    assert tensor.is_contiguous()
    assert tensor[1, 2, 3, 4] == images[1, 3, 4, 2]


@pytest.mark.parametrize(
    "images",
    [
        np.zeros((2, 8, 8, 3), np.float32),
        np.zeros((2, 8, 8), np.uint8),
        np.zeros((2, 3, 8, 8), np.uint8),
        np.zeros((2, 8, 6, 3), np.uint8),
        np.zeros((2, 192), np.uint8),
        np.zeros((0, 8, 8, 3), np.uint8),
    ],
    ids=["dtype", "grey", "channels first", "not square", "flat", "empty"],
)
def test_other_images_are_refused_by_name(images):
    with pytest.raises(UserError, match=r"folder/file\.npz: x_train"):
        checked_images(images, PATH, "x_train")


@pytest.mark.parametrize("dtype", [np.uint8, np.int32, np.int64])
def test_labels_become_int64(dtype):
    labels = checked_labels(np.array([0, 9, 4], dtype), IMAGES, PATH, "y_test")
    assert labels.dtype == torch.int64
    assert labels.tolist() == [0, 9, 4]


@pytest.mark.parametrize(
    ("labels", "words"),
    [
        (np.array([0.0, 1.0, 2.0]), "float64"),
        (np.zeros((3, 1), np.int64), r"\(3, 1\)"),
        (np.array([0, 1]), "2 labels for 3 images"),
        (np.array([0, 10, 1]), "from 0 to 10"),
        (np.array([0, -1, 1]), "from -1 to 1"),
    ],
)
def test_other_labels_are_refused_by_name(labels, words):
    with pytest.raises(UserError, match=rf"folder/file\.npz: y_test .*{words}"):
        checked_labels(labels, IMAGES, PATH, "y_test")
