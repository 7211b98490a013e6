"""Loads data sets as tensors in memory."""

from groupwise.data.image_sets import DATASETS, load_images
from groupwise.data.images import ImageData, channel_statistics, hold_out, normalize

__all__ = ["DATASETS", "ImageData", "channel_statistics", "hold_out", "load_images", "normalize"]
