"""Makes the networks to train, with names and weights as their libraries have them."""

from groupwise.models.image_networks import WideResNet, scatter_cnn

__all__ = ["WideResNet", "scatter_cnn"]
