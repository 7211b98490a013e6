"""Trains privately in the loops of other libraries: `groupwise.integrations.transformers`."""

from groupwise.torchvision_import import import_torchvision_first

import_torchvision_first()  # before transformers, which falls where torchvision is built for another torch
