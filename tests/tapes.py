"""Stands in for a CUDA graph where no GPU is: a tape of a microbatch's work.

It holds the operations below autograd, with their tensors, and runs them again on the same memory without any line of
Python above them, so that a decision or a number of the host's that should have followed the examples shows.
"""

from contextlib import nullcontext

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

ASKS = {"aten::_local_scalar_dense", "aten::equal", "aten::nonzero", "aten::is_nonzero"}
"""Operations for which the host waits, which a CUDA graph refuses."""


def alias(value):
    """A tensor on the same memory, which keeps its shape whatever becomes of that of the other."""
    return value.detach() if isinstance(value, torch.Tensor) else value


class Tape(TorchDispatchMode):
    """A `CudaRecorder` on a CPU."""

    def __init__(self):
        super().__init__()
        self.calls, self.launches = [], 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._schema.name in ASKS:
            raise RuntimeError(f"{func} is not permitted when a stream is capturing")
        given = tree_map(alias, (args, kwargs or {}))
        made = func(*args, **kwargs or {})
        self.calls.append((func, given, tree_map(alias, made)))
        return made

    def running(self):
        return nullcontext()

    def record(self, work):
        self.calls = calls = []
        with self:
            work()
        return lambda: self.launch(calls)

    def forget(self):
        pass

    @torch.no_grad()
    def launch(self, calls):
        self.launches += 1
        for func, given, made in calls:
            args, kwargs = tree_map(alias, given)
            again = func(*args, **kwargs)
            for old, new in zip(tree_leaves(made), tree_leaves(again), strict=True):
                if isinstance(old, torch.Tensor) and old.numel() and old.data_ptr() != new.data_ptr():
                    old.copy_(new)
