"""One call loads a data set; smaller images are averages of pixels."""

import numpy as np
import pytest
import torch

from groupwise.data import load_images
from groupwise.data.images import average_pool
from groupwise.errors import UserError


def test_pooling_averages_blocks_and_rounds():
    images = torch.tensor([[0, 1, 10, 20], [2, 4, 30, 40], [0, 0, 255, 255], [0, 0, 255, 255]], dtype=torch.uint8)
    pooled = average_pool(images.view(1, 1, 4, 4), 2)
    assert pooled.dtype == torch.uint8
    assert pooled.flatten().tolist() == [2, 25, 0, 255]  # 7/4 rounds up


def test_pooling_in_pieces_is_pooling_at_once():
    images = torch.randint(0, 256, (5000, 1, 4, 4), dtype=torch.uint8)
    whole = images.view(5000, 2, 2, 2, 2).float().mean(dim=(2, 4)).round().to(torch.uint8)
    assert torch.equal(average_pool(images, 2).view(5000, 2, 2), whole)


def test_image_size_scales_both_splits(tmp_path):
    data = load_images("digits", tmp_path, image_size=4)
    assert data.x_train.shape == (1433, 1, 4, 4)
    assert data.x_test.shape == (364, 1, 4, 4)
    assert data.image_size == 4


def test_the_own_size_changes_nothing(tmp_path):
    assert torch.equal(load_images("digits", tmp_path, image_size=8).x_train, load_images("digits", tmp_path).x_train)


@pytest.mark.parametrize("image_size", [0, -4, 3, 16])
def test_a_size_that_does_not_divide_is_refused(tmp_path, image_size):
    with pytest.raises(UserError, match=f"image_size={image_size}.*divisor of 8"):
        load_images("digits", tmp_path, image_size=image_size)


def test_an_unknown_name_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"'mnist' is not known; choose one of cifar10, digits\."):
        load_images("mnist", tmp_path)


def test_a_root_may_be_a_string(tmp_path):
    arrays = {"x_train": np.zeros((4, 8, 8, 3), np.uint8), "x_test": np.zeros((2, 8, 8, 3), np.uint8)}
    np.savez(tmp_path / "cifar10.npz", **arrays, y_train=np.arange(4), y_test=np.arange(2))
    assert load_images("cifar10", str(tmp_path), download=False).x_train.shape == (4, 3, 8, 8)
