"""Whether an error means that memory ran out, and what to say of it."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from groupwise.errors import UserError

WORDS = ("DefaultCPUAllocator", "could not create a primitive", "ALLOC_FAILED", "Cannot allocate memory")
"""In the RuntimeErrors of torch's allocator on a CPU, of oneDNN, of cuBLAS and cuDNN, and of the system."""


def ran_out(error: BaseException) -> bool:
    """Is it a lack of memory, on a GPU or a CPU?"""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(word in str(error) for word in WORDS)


@contextmanager
def memory_told() -> Iterator[None]:
    """A lack of memory inside, where nothing can be halved, becomes a `UserError`."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not ran_out(error):
            raise
        raise UserError(
            "Memory ran out outside of a training step: lower eval.batch_size or train.microbatch, or use a smaller "
            "model."
        ) from error
