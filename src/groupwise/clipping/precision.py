"""Sets the precision in which layers compute: autocast's in forward passes, full float32 in backward passes.

torch may multiply float32 numbers with 10 bits of fraction (TF32, on by default for convolutions on a GPU), or with 7
(bfloat16). A clipped sum would then not be what its norm was measured on: up to 1e-3 apart.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor


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


def no_autocast(device: str) -> AbstractContextManager[object]:
    """Rules choose their own precision; entering autocast costs microseconds a layer, so only where it is on."""
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()


def autocast(kind: str, x: Tensor, parameters: list[Tensor | None]) -> tuple[Tensor, list[Tensor | None]]:
    """What autocast would do to a layer's inputs, so that the rule itself can run without it."""
    device = x.device.type
    if kind == "keep" or not torch.is_autocast_enabled(device):
        return x, parameters
    dtype = torch.get_autocast_dtype(device) if kind == "lower" else torch.float32
    return x.to(dtype), [None if p is None else p.to(dtype) for p in parameters]
