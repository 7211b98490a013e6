"""Data sets as tensors in memory: CIFAR-10 and scikit-learn's digits."""

from groupwise.data.image_sets import DATASETS, load_images
from groupwise.data.images import ImageData, channel_statistics, normalize

__all__ = ["DATASETS", "ImageData", "channel_statistics", "load_images", "normalize"]
