"""The embedded data: same split everywhere, no network, no file of ours."""

import torch

from groupwise.data.image_sets import load_digits


def test_the_split_is_the_same_every_time():
    first, second = load_digits(), load_digits()
    assert torch.equal(first.x_test, second.x_test)
    assert first.sha256 == second.sha256
    # The data and the split of every record: a change here makes old results incomparable.
    assert first.sha256["sklearn.datasets.load_digits"].startswith("0b7e9c3202d7bcd2")
    assert first.y_test[:5].tolist() == [0, 1, 2, 3, 4]
