"""Counts the messages of a process at the door that all of torch's collectives go through, those of DTensor too."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

WAITS = ("wait_tensor", "_wrap_tensor_autograd", "barrier")
"""What sends no numbers."""


class Messages(TorchDispatchMode):
    """Inside, `seen` counts collectives by (name, bytes that this process puts in)."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[tuple[str, int]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            name = func._schema.name.partition("::")[2].rstrip("_")
            if name not in WAITS:
                tensors = [leaf for leaf in tree_leaves(args[0]) if isinstance(leaf, Tensor)]
                self.seen[name, sum(tensor.nbytes for tensor in tensors)] += 1
        return func(*args, **(kwargs or {}))

    @property
    def count(self) -> int:
        """Messages."""
        return sum(self.seen.values())

    @property
    def bytes(self) -> int:
        """Bytes that this process put into them."""
        return sum(size * often for (_, size), often in self.seen.items())
