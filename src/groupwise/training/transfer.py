"""Moves what the host made to a device without waiting for it: labels, padded tokens, numbers of examples.

A plain copy to a GPU waits until all work that was queued before it is done, once a microbatch. From page-locked memory
it takes its turn in the queue, and the host makes the next microbatch meanwhile: there is no other prefetching.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


def to_device(value: Tensor | np.ndarray, device: torch.device) -> Tensor:
    """The tensor, or the array's, on the device; on a GPU it is there once the queue has come to it."""
    tensor = torch.from_numpy(value) if isinstance(value, np.ndarray) else value
    if device.type != "cuda" or tensor.device.type != "cpu" or not torch.cuda.is_available():
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def row_numbers(examples: Sequence[int] | np.ndarray, device: torch.device) -> Tensor:
    """Numbers of examples as an index, (n,) int64."""
    return to_device(np.ascontiguousarray(examples, dtype=np.int64), device)
