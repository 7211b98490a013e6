"""Emulates a GPU: tensors on `cuda` have shapes, strides and dtypes but no values; operations are counted.

torch's FakeTensorMode infers the shapes of results and refuses operands on two devices. This module adds the rules of
CUDA that it lacks: cuDNN returns channels_last tensors if one operand is channels_last; `native_group_norm` takes only
contiguous tensors, and its backward kernel a grid of at most 65,535 groups; reading a value synchronises with the
device. CPU tensors are real, and operations on them are computed.
"""

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as Fakes
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

LARGEST_GRID = 65_535
"""Blocks on a CUDA grid's second axis."""
TENSORS_A_LAUNCH = {1: 110, 2: 64, 3: 48, 4: 36}
"""Tensors of each list that one kernel of `_foreach_…` takes, by the number of lists (ATen's MultiTensorApply.cuh)."""
NO_KERNEL = {
    *("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view", "lift_fresh"),
    *("detach_", "squeeze_", "unsqueeze_", "t_", "transpose_", "as_strided_", "set_"),
}
"""Operations that start no kernel, although their schema does not mark them as views."""
ONLY_WRITTEN = ("copy_", "zero_", "fill_", "normal_", "uniform_", "_foreach_zero_", "_foreach_copy_")
ONLY_LIKE = ("new_zeros", "new_ones", "new_full", "zeros_like", "ones_like", "full_like")
"""Operations that read only the shape, dtype and device of their tensor, not its values."""
ROWS_ADDED = ("index_add_", "scatter_add_")
ROWS_READ = ("embedding", "index_select", "gather", "index", "slice_backward", "select_backward")


class Refused(RuntimeError):
    """CUDA would refuse this operation."""


class Waits(RuntimeError):
    """The host would synchronise to read a value, which the emulated device does not have."""


class EmulatedGPU(TorchDispatchMode):
    """A mode in which `device="cuda"` is an emulated GPU."""

    def __init__(self) -> None:
        super().__init__()
        self._fakes = Fakes(allow_non_fake_inputs=True)
        self.clear()

    def clear(self) -> None:
        """Reset all counts to 0."""
        self.operations = Counter[str]()
        """Calls by name, views included."""
        self.launches = 0
        """Kernels started."""
        self.bytes = 0
        """Bytes that kernels read and write; memory that a kernel reads twice, or expanded, counts once."""
        self.waits = Counter[str]()
        """Copies to the host, which synchronise, by the function of `groupwise` that made them."""
        self.uploads = Counter[str]()
        """Copies from the host to the device, by the same functions."""

    @contextmanager
    def counted(self) -> Iterator[dict[str, Any]]:
        """Yield a dictionary that holds the counts of the `with` block after its end."""
        self.clear()
        row: dict[str, Any] = {}
        yield row
        row |= {"operations": self.operations.total(), "launches": self.launches, "bytes": self.bytes}
        row |= {"waits": dict(self.waits), "uploads": dict(self.uploads)}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        fakes = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, FakeTensor)]
        target = torch.device(kwargs["device"]).type if kwargs.get("device") is not None else None
        if not fakes and target != "cuda":
            return func(*args, **kwargs)
        namespace, name = func.overloadpacket._qualified_op_name.split("::")
        if namespace == "prim":  # a query of the tensor's metadata
            return func(*args, **kwargs)
        if name == "_to_copy" and target == "cpu":
            return self._to_host(args[0], kwargs)
        if name == "copy_" and not isinstance(args[0], FakeTensor):
            return args[0].copy_(self._to_host(args[1], {}))
        self._refuse(name, args)
        with self._fakes:
            try:
                out = func(*args, **kwargs)
            except (DataDependentOutputException, DynamicOutputShapeException) as error:
                raise Waits(f"{name} reads values from the device at {_place()}.") from error
        if name in ("convolution", "convolution_backward"):
            out = _as_cudnn(name, args, out)
        self._count(func, name, args, kwargs, out)
        return out

    def _to_host(self, source: Tensor, kwargs: dict[str, Any]) -> Tensor:
        """Zeros, as the emulated tensor has no values."""
        self.waits[_place()] += 1
        return torch.zeros(source.shape, dtype=kwargs.get("dtype") or source.dtype)

    def _refuse(self, name: str, args: tuple[Any, ...]) -> None:
        if name == "_local_scalar_dense":
            raise Waits(f"A value is read from the device at {_place()}.")
        if name in ("native_group_norm", "native_group_norm_backward"):
            backward = name.endswith("backward")
            for tensor in args[:2] if backward else args[:1]:
                if not tensor.is_contiguous():
                    raise Refused(f"{name}: CUDA expects a contiguous tensor, got strides {tensor.stride()}.")
            if backward and args[8] > LARGEST_GRID:
                raise Refused(f"{name}: {args[8]} groups exceed the blocks of a CUDA grid.")

    def _count(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        self.operations[name] += 1
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if name in ("_to_copy", "copy_", "_foreach_copy_") and any(not isinstance(t, FakeTensor) for t in given):
            self.uploads[_place()] += 1
        if func.is_view or name in NO_KERNEL:
            return
        results = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        self.launches += _launches(name, args)
        self.bytes += _moved(name, args, given, results, kwargs)


def _moved(name: str, args: tuple[Any, ...], given: list[Tensor], results: list[Tensor], kwargs: dict[str, Any]) -> int:
    """Bytes read and written."""
    written = sum(_bytes(t) for t in (results or tree_leaves(args[0])))  # `_foreach_…_` returns nothing
    out = {id(leaf) for leaf in tree_leaves(kwargs.get("out")) if leaf is not None}
    read = [t for t in given if id(t) not in out]
    if name in ONLY_WRITTEN:
        read = [t for t in tree_leaves(args[1:2]) if isinstance(t, Tensor)] if "copy" in name else []
    if name in ONLY_LIKE:
        read = []
    if name in ROWS_READ:  # only the selected rows of a table are read
        return 2 * written + sum(_bytes(t) for t in read[1:])
    if name in ROWS_ADDED:  # (self, dim, index, source): source is read, its target rows are read and written
        return 3 * _bytes(args[3]) + _bytes(args[2])
    if name == "convolution" and _is_last(read[1]) and not _is_last(read[0]):
        written += 2 * _bytes(read[0])  # cuDNN's own copy
    places = {(t.untyped_storage()._cdata, t.storage_offset(), _bytes(t)) for t in read}  # x and x.mT share memory
    return written + sum(size for _, _, size in places)


def _bytes(t: Tensor) -> int:
    """The bytes of a tensor in memory; an expanded axis and the overlap of windows count once."""
    count, span = 1, 1
    for size, stride in zip(t.shape, t.stride(), strict=True):
        count *= size if stride else min(size, 1)
        span += max(size - 1, 0) * stride
    return min(count, span) * t.element_size()


def _launches(name: str, args: tuple[Any, ...]) -> int:
    if not name.startswith("_foreach_"):
        return 1
    lists = [arg for arg in args if isinstance(arg, list | tuple) and arg and isinstance(arg[0], Tensor)]
    results = 0 if name.endswith("_") else 1
    return -(-len(lists[0]) // TENSORS_A_LAUNCH[min(4, len(lists) + results)])


def _as_cudnn(name: str, args: tuple[Any, ...], out: Any) -> Any:
    """The output in channels_last if the input or the weight is in it, as cuDNN returns it."""
    operands = args[1:3] if name.endswith("backward") else args[:2]
    if not any(map(_is_last, operands)):
        return out
    if isinstance(out, Tensor):
        return _last(out)
    return type(out)(_last(t) if isinstance(t, Tensor) and t.dim() == 4 else t for t in out)


def _last(t: Tensor) -> Tensor:
    return torch.empty_like(t, memory_format=torch.channels_last)


def _is_last(t: Tensor) -> bool:
    return t.dim() == 4 and t.is_contiguous(memory_format=torch.channels_last) and not t.is_contiguous()


def _place() -> str:
    """The innermost function of `groupwise` on the stack."""
    frame: Any = sys._getframe(1)
    while frame is not None and f"{_SEPARATOR}groupwise{_SEPARATOR}" not in frame.f_code.co_filename:
        frame = frame.f_back
    if frame is None:
        return "elsewhere"
    return f"{frame.f_code.co_filename.split(f'groupwise{_SEPARATOR}')[-1]}:{frame.f_code.co_qualname}"


_SEPARATOR = "/"


def emulate(module: torch.nn.Module) -> torch.nn.Module:
    """Put a module of meta tensors on the emulated device, in place; shared tensors stay shared."""
    known: dict[int, Tensor] = {}
    for owner in module.modules():
        for name, parameter in owner._parameters.items():
            if parameter is not None:
                shared = known.setdefault(id(parameter), _parameter_like(parameter))
                owner._parameters[name] = shared  # type: ignore[assignment]
        for name, buffer in owner._buffers.items():
            if buffer is not None:
                owner._buffers[name] = known.setdefault(id(buffer), on_device(buffer))
    return module


def on_device(t: Tensor) -> Tensor:
    """A tensor on the emulated device with the shape, strides and dtype of a meta one."""
    return torch.empty_like(t, device="cuda")


def _parameter_like(parameter: Tensor) -> Tensor:
    return torch.nn.Parameter(on_device(parameter.detach()), requires_grad=parameter.requires_grad)
