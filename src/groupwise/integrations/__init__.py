"""Trains privately in the loops of other libraries: `groupwise.integrations.transformers`."""

from importlib.util import find_spec

if find_spec("torchvision"):
    from groupwise.data.cifar10 import import_torchvision

    import_torchvision()  # before transformers, which falls where torchvision is built for another torch
