"""float32, or bfloat16 by autocast for the forward pass: weights, norms, sums and noise are float32 either way."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch

from groupwise.errors import UserError


def autocast(precision: str, device: torch.device) -> Callable[[], AbstractContextManager[Any]]:
    """A maker of contexts for the forward pass in `precision`; no loss scaling, which would break the clipping."""
    if precision == "float32":
        return nullcontext
    if precision == "bfloat16":
        return partial(torch.autocast, device.type, torch.bfloat16)
    raise UserError(f"train.precision={precision} is not known: choose float32 or bfloat16.")
