"""Trains privately in the loops of other libraries: `groupwise.integrations.transformers`."""

from groupwise.torchvision_import import mend_torchvision

mend_torchvision()  # before transformers, which falls where torchvision is built for another torch
