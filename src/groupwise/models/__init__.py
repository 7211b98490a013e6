"""Makes the networks to train, with names and weights as their libraries have them."""

from groupwise.models.scatter_cnn import scatter_cnn
from groupwise.models.wide_resnet import BLOCK_ORDERS, WideResNet, wide_resnet

__all__ = ["BLOCK_ORDERS", "WideResNet", "scatter_cnn", "wide_resnet"]
