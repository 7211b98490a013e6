"""The digits data set of scikit-learn has a fixed split."""

import torch

from groupwise.data.image_sets import load_digits


def test_split_is_deterministic():
    first, second = load_digits(), load_digits()
    assert torch.equal(first.x_test, second.x_test)
    assert first.sha256 == second.sha256
    # Committed results use these data and this split; a change would make them incomparable.
    assert first.sha256["sklearn.datasets.load_digits"].startswith("0b7e9c3202d7bcd2")
    assert first.y_test[:5].tolist() == [0, 1, 2, 3, 4]
