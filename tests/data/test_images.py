"""The split of the digits, and pooling, normalisation and held-out shares of image data."""

from dataclasses import replace

import pytest
import torch

from groupwise.data.image_sets import load_images
from groupwise.data.images import average_pool, hold_out, normalize
from groupwise.errors import UserError


def test_split_of_the_digits_is_deterministic(tmp_path):
    first, second = (load_images("digits", tmp_path) for _ in range(2))
    assert torch.equal(first.x_test, second.x_test)
    assert first.sha256 == second.sha256
    # Committed results use these data and this split; a change would make them incomparable.
    assert first.sha256["sklearn.datasets.load_digits"].startswith("0b7e9c3202d7bcd2")
    assert first.y_test[:5].tolist() == [0, 1, 2, 3, 4]


def test_pooling_averages_blocks_and_rounds():
    images = torch.tensor([[0, 1, 10, 20], [2, 4, 30, 40], [0, 0, 255, 255], [0, 0, 255, 255]], dtype=torch.uint8)
    pooled = average_pool(images.view(1, 1, 4, 4), 2)
    assert pooled.dtype == torch.uint8
    assert pooled.flatten().tolist() == [2, 25, 0, 255]  # 7/4 rounds up


def test_image_size_scales_both_splits(tmp_path):
    data = load_images("digits", tmp_path, image_size=4)
    assert data.x_train.shape == (1433, 1, 4, 4)
    assert data.x_test.shape == (364, 1, 4, 4)
    assert data.image_size == 4


@pytest.mark.parametrize("image_size", [0, -4, 3, 16])
def test_size_that_does_not_divide_is_refused(tmp_path, image_size):
    with pytest.raises(UserError, match=f"image_size={image_size}.*divisor of 8"):
        load_images("digits", tmp_path, image_size=image_size)


def test_unknown_name_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"'mnist' is not known; choose one of cifar10, digits\."):
        load_images("mnist", tmp_path)


def test_each_channel_is_centred_and_scaled():
    images = torch.tensor([0, 51, 255], dtype=torch.uint8).view(1, 3, 1, 1)
    out = normalize(images, (0.5, 0.2, 0.0), (0.5, 0.1, 2.0))
    assert out.dtype == torch.float32
    torch.testing.assert_close(out.flatten(), torch.tensor([-1.0, 0.0, 0.5]))


def test_held_out_share_replaces_the_test_set(tmp_path):
    data = load_images("digits", tmp_path)
    held = hold_out(data, 0.2)
    train, valid = {i.tobytes() for i in held.x_train.numpy()}, {i.tobytes() for i in held.x_test.numpy()}
    assert not train & valid and train | valid == {image.tobytes() for image in data.x_train.numpy()}
    assert len(held.x_train) + len(held.x_test) == len(data.x_train) == 1433
    assert abs(len(held.x_test) / 1433 - 0.2) < 0.04
    assert len(held.y_train) == len(held.x_train) and len(held.y_test) == len(held.x_test)
    assert f"{len(held.x_test)} of 1,433 training images held out" in held.source


def test_held_out_images_keep_labels_and_order(tmp_path):
    data = replace(load_images("digits", tmp_path), y_train=torch.arange(1433))  # labels are the indices of the images
    held = hold_out(data, 0.3)
    for images, numbers in ((held.x_train, held.y_train), (held.x_test, held.y_test)):
        assert torch.equal(data.x_train[numbers], images) and (numbers.diff() > 0).all()


def test_side_of_an_image_does_not_depend_on_other_images(tmp_path):
    data = load_images("digits", tmp_path)
    fewer = hold_out(replace(data, x_train=data.x_train[1:], y_train=data.y_train[1:]), 0.3)
    full = hold_out(data, 0.3)
    assert len(full.x_train) + len(full.x_test) == len(fewer.x_train) + len(fewer.x_test) + 1
    assert torch.equal(fewer.x_train, full.x_train[-len(fewer.x_train) :])
    assert torch.equal(fewer.x_test, full.x_test[-len(fewer.x_test) :])


def test_held_out_images_depend_only_on_the_key(tmp_path):
    data = load_images("digits", tmp_path)
    assert torch.equal(hold_out(data, 0.2).x_test, hold_out(data, 0.2).x_test)
    assert not torch.equal(hold_out(data, 0.2).x_test[:9], hold_out(data, 0.2, key=1).x_test[:9])


@pytest.mark.parametrize("share", [1e-6, 1.0])
def test_share_that_leaves_a_side_empty_is_refused(tmp_path, share):
    with pytest.raises(UserError, match=f"data.holdout={share} of 1433 .*one set empty"):
        hold_out(load_images("digits", tmp_path), share)
