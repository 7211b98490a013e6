"""In double, whatever asks for float32 gets float64: many models compute a part in float32, whatever their dtype."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import torch
from torch import Tensor


@contextmanager
def in_double() -> Iterator[None]:
    """Inside, `.float()`, `torch.float32` and the default dtype mean float64, in forward and backward passes.

    Rotary positions, RMS norms and softmaxes of many models are in float32. Their rounding, 1e-7 of a gradient, is the
    model's own, and would hide what is asked here: whether a clipped sum is right. A float32 of the engine's own would
    go unseen here; the library's tests are there for that.
    """
    before = torch.get_default_dtype()
    with ExitStack() as stack:
        for owner, name in ((torch, "float32"), (torch, "float")):
            stack.enter_context(patch.object(owner, name, torch.float64))
        stack.enter_context(patch.object(Tensor, "float", Tensor.double))
        torch.set_default_dtype(torch.float64)
        try:
            yield
        finally:
            torch.set_default_dtype(before)
