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
OVERHEAD = 3.0
"""Peak memory divided by the memory of saved activations: it includes output gradients and temporaries."""
GPU_SHARE = 0.6
CPU_BUDGET = 2 << 30
CPU_MOST = 256
"""The largest microbatch on a CPU, which gets no faster with more examples at once."""


def choose_microbatch(
    losses_of: Callable[[Any], Tensor],
    model: nn.Module,
    device: torch.device,
    examples: np.ndarray,
    most: int | None = None,
) -> int:
    """Choose the microbatch size: the largest power of two whose activations fit the memory budget.

    Activations are measured in forward passes of the largest example once and twice: their difference leaves out what
    does not grow with the batch, such as autocast's copies of weights. On a CPU the budget is an eighth of the memory,
    and at most 2 GiB. On a GPU it is three fifths of the memory that the model, its gradients and two optimiser moments
    leave. It does not depend on the memory that is free now, so the choice is always the same. If other processes use
    the GPU, the first step may halve the microbatch.

    Args:
        losses_of: a function of the indices of examples that returns their losses, with gradients.
        examples: the indices of all training examples or of a few, the largest examples first.
        most: the number of training examples; None is the length of `examples`.
    """
    most = most or len(examples)

    def weights() -> set[int]:
        return {getattr(p, "_local_tensor", p).untyped_storage().data_ptr() for p in model.parameters()}

    known, gathers = weights(), any(hasattr(p, "_local_tensor") for p in model.parameters())

    def saved_by(copies: int) -> int:
        held: dict[int, int] = {}

        def note(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in (weights() if gathers else known):
                held[storage.data_ptr()] = storage.nbytes()
            return tensor

        with saved_tensors_hooks(note, lambda t: t):
            check_losses(losses_of(examples[:1].repeat(copies)), copies, traced=True)
        return sum(held.values())

    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        per_example = max(saved_by(2) - saved_by(1), 1)
    if device.type == "cuda":
        budget, limit = gpu_budget(model, device), most
    else:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        budget, limit = min(CPU_BUDGET, memory / 8), min(most, CPU_MOST)
    fits = max(1, min(limit, int(budget / (OVERHEAD * per_example))))
    return 1 << (fits.bit_length() - 1)


def fill_evenly(size: int, batch_size: float) -> int:
    """A microbatch size near `size` with which nearly every Poisson batch needs the same number of microbatches.

    A batch of B expected examples rarely has more than B + 4·√B. With microbatches of B examples, every second batch
    would need another microbatch for a few examples.
    """
    largest = batch_size + 4 * math.sqrt(batch_size)
    return size if size >= largest else math.ceil(largest / math.ceil(batch_size / size))


def gpu_budget(model: nn.Module, device: torch.device) -> float:
    """The memory budget of activations in bytes: a share of the GPU's whole memory, whether it is free or not."""
    held = sum(getattr(p, "_local_tensor", p).nbytes * (4 if p.requires_grad else 1) for p in model.parameters())
    return GPU_SHARE * max(torch.cuda.get_device_properties(device).total_memory - held, 0)


_MMAP_THRESHOLD, _TRIM_THRESHOLD = -3, -1
"""The numbers of M_MMAP_THRESHOLD and M_TRIM_THRESHOLD in glibc; `_LARGEST_INT` is their largest value."""
_LARGEST_INT = (1 << 31) - 1


def keep_freed_blocks() -> bool:
    """Make this process keep the memory that a step frees; returns False if the C library is not glibc.

    By default a freed block of 32 MiB or more returns to the system, which fills the next block with zeros. For a small
    network on a CPU this takes a fifth of the time of a private step. Blocks of 2 GiB and more still return. The
    setting cannot be undone, so use it only in a process that does nothing but train.
    """
    if (library := _glibc()) is None:
        return False
    return bool(library.mallopt(_MMAP_THRESHOLD, _LARGEST_INT)) and bool(library.mallopt(_TRIM_THRESHOLD, _LARGEST_INT))


TRIMMED = 100
"""The number of steps on a CPU between two calls of `return_freed_memory`."""


def return_freed_memory() -> None:
    """Return the free memory between used blocks to the system, if the C library is glibc.

    Poisson batches have many sizes, so a freed block seldom fits the next batch. Without this a process grows for
    thousands of steps, to several times the memory that it needs.
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
"""Parts of the RuntimeErrors of CUDA, torch's CPU allocator, oneDNN, cuBLAS and cuDNN, and the operating system."""


def is_oom(error: BaseException) -> bool:
    """Whether the error says that memory ran out, on a GPU or a CPU."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    if isinstance(error, RuntimeError) and any(word in str(error) for word in OOM_MESSAGES):
        return True
    return error.__context__ is not None and is_oom(error.__context__)  # torch.cuda.graph raises another error


def halve_on_oom(size: int, work: Callable[[int], T], doing: str = "evaluating", alone: bool = False) -> T:
    """Return `work(size)`. If memory runs out, halve the size and try again, down to one example.

    In runs of several processes there is no second try unless `work` is `alone`: it does not communicate.
    """
    while True:
        try:
            return work(size)
        except (RuntimeError, MemoryError) as error:
            if size == 1 or (dist.is_initialized() and not alone) or not is_oom(error):
                raise
        size //= 2  # outside of `except`, as the error keeps the memory of the failed try in use
        torch.cuda.empty_cache()  # does nothing on a CPU
        print(f"warning: memory ran out; {doing} with {size} examples at once.", file=sys.stderr)


@contextmanager
def oom_as_user_error() -> Iterator[None]:
    """Turn an out-of-memory error into a `UserError`."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_oom(error):
            raise
        raise UserError(
            "Memory ran out: use a smaller model, or lower train.microbatch, eval.batch_size or "
            "eval.generate.batch_size. To resume from a checkpoint, lower only the last two, and add resume=<the run's "
            "folder>."
        ) from error
