"""The 1,797 handwritten digits that come with scikit-learn: real data without a network."""

import numpy as np
import torch

from groupwise.data.checksum import sha256_of_bytes
from groupwise.data.images import ImageData

MAX_INTENSITY = 16
TEST_EVERY = 5


def load_digits() -> ImageData:
    """Load the UCI digits: 8×8 grey images in 10 classes, of which every fifth of a class is the test set.

    Intensities 0..16 become 0..255. The split is fixed, the same on every machine and stratified: within each
    class the examples 0, 5, 10, ... in scikit-learn's order are for testing (1,433 for training, 364 for
    testing). The fingerprint is of the decoded arrays: where scikit-learn keeps its file is its own affair.
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
