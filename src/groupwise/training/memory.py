"""Chooses the microbatch size, keeps freed memory for the next step, and handles out-of-memory errors."""

import ctypes
import math
import os
import platform
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from groupwise.clipping.checks import check_losses
from groupwise.errors import UserError

T = TypeVar("T")
MEASURED = 2
"""Examples in the forward pass whose activations are measured."""
OVERHEAD = 3.0
"""Peak memory divided by saved activations: there are output gradients and temporaries too."""
GPU_SHARE = 0.6
CPU_BUDGET = 2 << 30
CPU_MOST = 256
"""More examples at once make a CPU no faster."""


def choose_microbatch(
    losses_of: Callable[[Any], Tensor],
    model: nn.Module,
    device: torch.device,
    examples: np.ndarray,
    most: int | None = None,
) -> int:
    """The largest power of two whose activations fit the budget, measured in a forward pass of two examples.

    On a CPU the budget is an eighth of the machine's memory, and at most 2 GiB. On a GPU it is three fifths of its
    memory, minus the model, its gradients and two optimiser moments. It does not depend on what is free at the moment,
    so that the choice is always the same. If other processes use the GPU, the first step may halve it.

    Args:
        losses_of: indices of training examples -> losses, with gradients on.
        model: the model, whose own weights are not activations.
        device: where it is.
        examples: all training examples, or a few of them, the largest first.
        most: how many training examples there are; by default as many as `examples`.
    """
    held: dict[int, int] = {}
    most = most or len(examples)
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            held[storage.data_ptr()] = storage.nbytes()
        return tensor

    with (
        torch.random.fork_rng(devices=[device] if device.type == "cuda" else []),
        saved_tensors_hooks(note, lambda t: t),
    ):
        measured = examples[:MEASURED]
        check_losses(losses_of(measured), len(measured), traced=True)
    per_example = max(sum(held.values()) / len(measured), 1.0)
    if device.type == "cuda":
        budget, limit = gpu_budget(model, device), most
    else:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        budget, limit = min(CPU_BUDGET, memory / 8), min(most, CPU_MOST)
    fits = max(1, min(limit, int(budget / (OVERHEAD * per_example))))
    return 1 << (fits.bit_length() - 1)


def fill_evenly(size: int, batch_size: float) -> int:
    """A microbatch of about `size` examples, so that nearly every Poisson batch needs the same number of microbatches.

    A batch of B examples in expectation has up to B + 4·√B. With microbatches of B, every second batch would need one
    more, of a few examples.
    """
    largest = batch_size + 4 * math.sqrt(batch_size)
    return size if size >= largest else math.ceil(largest / math.ceil(batch_size / size))


def gpu_budget(model: nn.Module, device: torch.device) -> float:
    """Bytes for activations: a share of the GPU's whole memory, not of what is free."""
    held = sum(p.numel() * p.element_size() * (4 if p.requires_grad else 1) for p in model.parameters())
    return GPU_SHARE * max(torch.cuda.get_device_properties(device).total_memory - held, 0)


_MMAP_THRESHOLD, _TRIM_THRESHOLD = -3, -1
"""glibc's codes of M_MMAP_THRESHOLD and M_TRIM_THRESHOLD, and below the largest value of the first."""
_LARGEST_INT = (1 << 31) - 1


def keep_freed_blocks() -> bool:
    """Let this process keep the memory that a step frees. Returns whether it does, as it needs glibc.

    By default a freed block of 32 MiB or more returns to the system, which fills the next one with zeros. That takes a
    fifth of a small network's private step on a CPU. Blocks of 2 GiB and more still return. It cannot be undone, so
    call it only in processes that do nothing but a run.
    """
    if (library := _glibc()) is None:
        return False
    return bool(library.mallopt(_MMAP_THRESHOLD, _LARGEST_INT)) and bool(library.mallopt(_TRIM_THRESHOLD, _LARGEST_INT))


TRIMMED = 100
"""Steps on a CPU between two calls of `return_freed_memory`."""


def return_freed_memory() -> None:
    """Return free memory between blocks in use to the system, if the C library is glibc.

    The batches of a run have as many sizes as steps, so freed blocks seldom fit again: without this a process grows for
    thousands of steps, to several times what it needs.
    """
    if (library := _glibc()) is not None:
        library.malloc_trim(ctypes.c_size_t(0))


@cache
def _glibc() -> Any:
    """The C library if it is glibc, else None."""
    return ctypes.CDLL(None) if platform.libc_ver()[0] == "glibc" else None


OOM_MESSAGES = (
    "CUDA error: out of memory",
    "DefaultCPUAllocator",
    "could not create a primitive",
    "ALLOC_FAILED",
    "Cannot allocate memory",
)
"""In the RuntimeErrors of CUDA, of torch's allocator on a CPU, of oneDNN, of cuBLAS and cuDNN, and of the system."""


def is_oom(error: BaseException) -> bool:
    """Whether memory ran out, on a GPU or a CPU."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    if isinstance(error, RuntimeError) and any(word in str(error) for word in OOM_MESSAGES):
        return True
    return error.__context__ is not None and is_oom(error.__context__)  # a failed recording raises another error


def halve_on_oom(size: int, work: Callable[[int], T], doing: str = "evaluating", alone: bool = False) -> T:
    """Return `work(size)`; while memory runs out, try again with half the size.

    With several processes there is no second try, unless `alone` says that `work` does not communicate.
    """
    while True:
        try:
            return work(size)
        except (RuntimeError, MemoryError) as error:
            if size == 1 or (dist.is_initialized() and not alone) or not is_oom(error):
                raise
        size //= 2  # outside of `except`, which holds the memory of the failed try
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        print(f"warning: memory ran out; {doing} with {size} examples at once.", file=sys.stderr)


@contextmanager
def oom_as_user_error() -> Iterator[None]:
    """An out-of-memory error inside becomes a `UserError`."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_oom(error):
            raise
        raise UserError(
            "Memory ran out: use a smaller model, or lower eval.batch_size or eval.generate.batch_size; if the run "
            "has a checkpoint, add resume=<the run's folder>."
        ) from error
