"""Builds the networks to train. Names of parameters are those of the original libraries."""

from groupwise.models.image_networks import WideResNet, scatter_cnn

__all__ = ["WideResNet", "scatter_cnn"]
