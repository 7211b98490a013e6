"""Data sets as tensors in memory: CIFAR-10 and scikit-learn's digits."""

from groupwise.data.images import DATASETS, ImageData, hold_out, load_images
from groupwise.data.normalization import channel_statistics, normalize

__all__ = ["DATASETS", "ImageData", "channel_statistics", "hold_out", "load_images", "normalize"]
