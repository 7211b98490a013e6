"""From a file's arrays to `ImageData`, refusing what does not look like CIFAR-10."""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from groupwise.errors import UserError

NUM_CLASSES = 10


def checked_images(images: np.ndarray, path: Path, key: str) -> Tensor:
    """Turn images (N, H, H, 3) of uint8 into a tensor (N, 3, H, H).

    Raises:
        UserError: another dtype or shape; the message names the file and the array.
    """
    square = images.ndim == 4 and images.shape[-1] == 3 and images.shape[1] == images.shape[2] > 0
    if images.dtype != np.uint8 or not square:
        raise UserError(
            f"{path}: {key} has dtype {images.dtype} and shape {images.shape}, but CIFAR-10 images are uint8 "
            "of shape (N, H, H, 3); convert the file."
        )
    if len(images) == 0:
        raise UserError(f"{path}: {key} holds no image; at least one is needed, so replace the file.")
    return torch.from_numpy(np.ascontiguousarray(images.transpose(0, 3, 1, 2)))


def checked_labels(labels: np.ndarray, images: Tensor, path: Path, key: str) -> Tensor:
    """Turn integer labels (N,) in 0..9, one for each image, into an int64 tensor.

    Raises:
        UserError: another dtype, shape, length or range; the message names the file and the array.
    """
    if labels.ndim != 1 or not np.issubdtype(labels.dtype, np.integer):
        raise UserError(
            f"{path}: {key} has dtype {labels.dtype} and shape {labels.shape}, but labels are integers of "
            "shape (N,); convert the file."
        )
    if len(labels) != len(images):
        raise UserError(
            f"{path}: {key} has {len(labels)} labels for {len(images)} images; the two must be of one "
            "length, so replace the file."
        )
    low, high = int(labels.min()), int(labels.max())
    if low < 0 or high >= NUM_CLASSES:
        raise UserError(
            f"{path}: {key} holds labels from {low} to {high}, but CIFAR-10 has the classes 0 to "
            f"{NUM_CLASSES - 1}; replace the file."
        )
    return torch.from_numpy(labels.astype(np.int64))
