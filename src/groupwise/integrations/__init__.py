"""Private training with other libraries: `groupwise.integrations.transformers`."""

from groupwise.torchvision_import import import_torchvision_first

import_torchvision_first()  # before transformers, whose import fails if torchvision is built for another torch
