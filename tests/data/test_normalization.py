"""Bytes to floats, by public constants."""

import pytest
import torch

from groupwise.data import channel_statistics, normalize
from groupwise.errors import UserError


def test_cifar10_uses_the_published_constants():
    assert channel_statistics("cifar10") == ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))


def test_each_channel_is_centred_and_scaled():
    images = torch.tensor([0, 51, 255], dtype=torch.uint8).view(1, 3, 1, 1)
    out = normalize(images, (0.5, 0.2, 0.0), (0.5, 0.1, 2.0))
    assert out.dtype == torch.float32
    torch.testing.assert_close(out.flatten(), torch.tensor([-1.0, 0.0, 0.5]))


def test_the_digits_end_in_minus_one_to_one():
    images = torch.tensor([0, 255], dtype=torch.uint8).view(2, 1, 1, 1)
    assert normalize(images, *channel_statistics("digits")).flatten().tolist() == [-1.0, 1.0]


def test_an_image_is_normalised_alone():
    """No statistic is taken from the batch: an example does not depend on its neighbours."""
    images = torch.randint(0, 256, (5, 3, 4, 4), dtype=torch.uint8)
    statistics = channel_statistics("cifar10")
    assert torch.equal(normalize(images, *statistics)[:2], normalize(images[:2], *statistics))


def test_mistakes_are_named():
    images = torch.zeros(2, 3, 4, 4, dtype=torch.uint8)
    with pytest.raises(UserError, match="float32"):
        normalize(images.float(), (0.5,) * 3, (0.5,) * 3)
    with pytest.raises(UserError, match="1 means"):
        normalize(images, (0.5,), (0.5,))
    with pytest.raises(UserError, match=r"mnist.*cifar10"):
        channel_statistics("mnist")
