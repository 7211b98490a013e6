"""Bytes and operations of tensors that are never allocated: a model's own code run on torch's fake tensors."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

_aten = torch.ops.aten
_ATTENTION: dict[Any, Callable[..., int]] = {
    _aten._scaled_dot_product_flash_attention_for_cpu: lambda q, k, v: sdpa_flop_count(q, k, v),
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: lambda g, q, k, v: sdpa_backward_flop_count(g, q, k, v),
}
"""What torch's own counter leaves out."""


class Meter(TorchDispatchMode):
    """While it is entered: bytes held by new tensors now and at most since `restart`, and operations since then.

    Operations are those of matrix products, convolutions and attention, a multiply-add is two. What a kernel needs
    inside itself and gives back before it returns is not seen. (torch's FlopCounterMode would keep tensors alive.)
    """

    def __init__(self) -> None:
        super().__init__()
        self.held = 0
        self.peak = 0
        self.operations = 0
        self._known: set[int] = set()

    def ignore(self, *tensors: Tensor) -> None:
        """Do not count these, nor views of them."""
        self._known |= {tensor.untyped_storage()._cdata for tensor in tensors}

    def restart(self) -> int:
        """Forget peak and operations; returns what is held."""
        self.peak, self.operations = self.held, 0
        return self.held

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _aten._local_scalar_dense.default:  # a question about values: the answer of a usual batch is yes
            return {torch.bool: True}.get(args[0].dtype, 1)
        out = func(*args, **(kwargs or {}))
        self.operations += _operations(func, args, kwargs or {}, out)
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self._count(leaf.untyped_storage())
        return out

    def _count(self, storage: Any) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._known:
            return
        self._known.add(key)
        self.held += size
        self.peak = max(self.peak, self.held)
        weakref.finalize(storage, self._drop, key, size)

    def _drop(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.held -= size


class Imagined:
    """A world of fake tensors of the CPU: `with imagined.running():` everything new is fake and metered."""

    def __init__(self) -> None:
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        self.meter = Meter()

    def take(self, module: nn.Module) -> None:
        """Put fake tensors of the same shapes and dtypes in the place of a module's parameters and buffers.

        Parameters that are one stay one. They are not counted by the meter.
        """
        seen: dict[int, Tensor] = {}
        for part in module.modules():
            for places in (part._parameters, part._buffers):
                for name, tensor in places.items():
                    if tensor is not None:
                        places[name] = seen.setdefault(id(tensor), self._copy(tensor))  # type: ignore[assignment]
        self.meter.ignore(*seen.values())

    def _copy(self, tensor: Tensor) -> Tensor:
        with self._fake:
            fake = torch.empty(tensor.shape, dtype=tensor.dtype)
        return nn.Parameter(fake, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else fake

    @contextmanager
    def running(self) -> Iterator[Meter]:
        """Everything inside is imagined."""
        with self._fake, self.meter:
            yield self.meter


def _operations(func: Any, args: Any, kwargs: Any, out: Any) -> int:
    kind = func._overloadpacket
    if kind in _ATTENTION:
        return _ATTENTION[kind](*(t.shape for t in args[: 3 + kind.__name__.endswith("backward")]))
    return flop_registry[kind](*args, **kwargs, out_val=out) if kind in flop_registry else 0
