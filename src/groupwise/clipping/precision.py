"""Full float32 while a backward pass measures and adds up gradients, whatever the program allows elsewhere.

torch may multiply float32 numbers with 10 bits of fraction (TF32, on by default for convolutions on a GPU), or with 7
(bfloat16). A clipped sum would then not be what its norm was measured on: up to 1e-3 apart.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def full_float32() -> Iterator[None]:
    """Inside, products and convolutions of float32 tensors keep all their bits; the settings are put back as they were.

    They are the process's own, so they hold in autograd's threads as well.
    """
    on: Any = torch.backends
    settings = (on.cuda.matmul, on.cudnn.conv, on.cudnn.rnn, on.mkldnn.matmul, on.mkldnn.conv)
    before = [setting.fp32_precision for setting in settings]
    for setting in settings:
        setting.fp32_precision = "ieee"
    try:
        yield
    finally:
        for setting, precision in zip(settings, before, strict=True):
            setting.fp32_precision = precision
