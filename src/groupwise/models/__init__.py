"""Networks to train: the wide residual network of the CIFAR-10 experiments (paper, section 4.1)."""

from groupwise.models.wide_resnet import BLOCK_ORDERS, WideResNet, wide_resnet

__all__ = ["BLOCK_ORDERS", "WideResNet", "wide_resnet"]
