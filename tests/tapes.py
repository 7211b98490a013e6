"""Emulates CUDA graphs on a CPU: records the operations of a microbatch, and replays them on the same memory.

A replay runs the recorded operations below autograd and none of the Python code above them. So a Python number or
branch that depends on the examples keeps its value from the recording, as in a CUDA graph, and results differ.
"""

from contextlib import nullcontext

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

ASKS = {"aten::_local_scalar_dense", "aten::equal", "aten::nonzero", "aten::is_nonzero"}
"""Operations that make the host wait for the device, which is an error while a CUDA graph is captured."""


def alias(value):
    """A tensor on the same memory, which keeps its shape if the original is resized."""
    return value.detach() if isinstance(value, torch.Tensor) else value


class Tape(TorchDispatchMode):
    """Does on a CPU what `CudaRecorder` does on a GPU."""

    def __init__(self):
        super().__init__()
        self.calls, self.launches = [], 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._schema.name in ASKS:
            raise RuntimeError(f"{func} is not permitted when a stream is capturing")
        inputs = tree_map(alias, (args, kwargs or {}))
        outputs = func(*args, **kwargs or {})
        self.calls.append((func, inputs, tree_map(alias, outputs)))
        return outputs

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
        for func, inputs, outputs in calls:
            args, kwargs = tree_map(alias, inputs)
            again = func(*args, **kwargs)
            for old, new in zip(tree_leaves(outputs), tree_leaves(again), strict=True):
                if isinstance(old, torch.Tensor) and old.numel() and old.data_ptr() != new.data_ptr():
                    old.copy_(new)
