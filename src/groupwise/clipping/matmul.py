"""Multiplies float32 matrices on a CPU with the faster of torch's two libraries, MKL and oneDNN.

torch uses MKL for products and oneDNN for convolutions. Some processors (AMD with AVX-512) multiply twice as fast with
oneDNN. Each process measures once, on one product, which library is faster. Checkpoints keep the answer, as the two
round differently. On other devices, and for small products, torch's own product is used.
"""

import time
from collections.abc import Callable
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from groupwise.errors import UserError

LIBRARIES = ("torch", "onednn")
LEAST = 1 << 22
"""Floating-point operations (a multiply-add is two) from which oneDNN makes up for its overhead of 10 µs per call."""
GAIN = 1.2
"""oneDNN is used if it is faster by this factor."""

FLOAT32 = torch.float32
"""A constant, because tests in double precision replace `torch.float32` by float64."""
PLAIN = (Tensor, nn.Parameter)
"""Tensor types for oneDNN: subclasses may define their own products."""

_used: str | None = None


def use(library: str) -> None:
    """Set the library of this process: one of `LIBRARIES`, or "auto" for the faster one.

    Raises:
        UserError: another name, or oneDNN was requested and torch does not have it.
    """
    global _used
    if library not in (*LIBRARIES, "auto"):
        raise UserError(f"matmul is {library!r}: give auto, {' or '.join(LIBRARIES)}.")
    if library == "onednn" and not has_onednn():
        raise UserError("matmul=onednn: this torch has no float32 products by oneDNN on this processor: give auto.")
    _used = None if library == "auto" else library


def repeat(library: str) -> None:
    """Use the library of a training that is resumed, if this machine has it; else the faster one."""
    use(library if library == "torch" or has_onednn() else "auto")


def used() -> str:
    """The library that is used for large products."""
    return _used or faster()


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x Wᵀ + b (..., p) of x (..., d), W (p, d) and b (p,)."""
    if _by_onednn(2 * x.numel() * len(weight), x, weight):
        return _onednn(x.reshape(-1, x.shape[-1]), weight, bias).view(*x.shape[:-1], len(weight))
    return F.linear(x, weight, bias)


def product(a: Tensor, b: Tensor) -> Tensor:
    """AB (..., m) of a (..., k) and b (k, m)."""
    if _by_onednn(2 * a.numel() * b.shape[1], a, b):
        return _onednn(a.reshape(-1, len(b)), b.t()).view(*a.shape[:-1], b.shape[1])
    return a @ b


def batched(a: Tensor, b: Tensor) -> Tensor:
    """AB (B, n, m) of a (B, n, k) and b (B, k, m), one product per example."""
    if not _by_onednn(2 * a.shape[1] * a.shape[2] * b.shape[2], a, b):
        return torch.bmm(a, b)
    out = a.new_empty(len(a), a.shape[1], b.shape[2])
    for one, left, right in zip(out, a, b, strict=True):
        one.copy_(_onednn(left, right.t()))
    return out


def are_by_onednn(x: Tensor, weight: Tensor) -> bool:
    """Whether oneDNN computes a linear layer's products of an input (..., d) and a weight (p, d) or (d, p); it has no
    derivative for them."""
    return _by_onednn(2 * x.numel() * weight.numel() // max(1, x.shape[-1]), x, weight, derivatives=True)


def _by_onednn(operations: int, a: Tensor, b: Tensor, derivatives: bool = False) -> bool:
    return (
        operations >= LEAST
        and (derivatives or not torch.is_grad_enabled())
        and a.device.type == "cpu"
        and a.dtype == b.dtype == FLOAT32
        and type(a) in PLAIN
        and type(b) in PLAIN
        and used() == "onednn"
    )


def _onednn(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """ABᵀ + bias of a (n, k), b (m, k), which may be transposed views, and bias (m,)."""
    made: Tensor = torch.ops.mkldnn._linear_pointwise(_dense(a), _dense(b), bias, "none", [], "")
    return made


def _dense(t: Tensor) -> Tensor:
    """A contiguous matrix (or transpose of one): oneDNN has no fast kernel for gaps between rows."""
    return t if t.is_contiguous() or t.t().is_contiguous() else t.contiguous()


@lru_cache
@torch.no_grad()
def has_onednn() -> bool:
    """Whether torch has oneDNN's product of float32 matrices, and it is correct."""
    if not torch.backends.mkldnn.is_available():
        return False
    a, b, bias = (torch.sin(torch.arange(n, dtype=FLOAT32, device="cpu")) for n in (33 * 65, 17 * 65, 17))
    a, b = a.view(65, 33).t(), b.view(17, 65)
    try:
        made = _onednn(a, b, bias)
    except (AttributeError, RuntimeError):  # a private name of torch's
        return False
    return torch.allclose(made.double(), F.linear(a.double(), b.double(), bias.double()), rtol=1e-5, atol=1e-5)


@lru_cache
@torch.no_grad()
def faster() -> str:
    """The faster library here, by the best of a few alternating runs of x Wᵀ; takes some milliseconds."""
    if not has_onednn():
        return "torch"
    a, b = (torch.full((rows, 256), 0.5, dtype=FLOAT32, device="cpu") for rows in (256, 512))
    ways: tuple[Callable[[], Tensor], ...] = (lambda: F.linear(a, b), lambda: _onednn(a, b))
    best = [float("inf"), float("inf")]
    for _ in range(8):
        for i, way in enumerate(ways):
            start = time.perf_counter()
            way()
            best[i] = min(best[i], time.perf_counter() - start)
    return "onednn" if best[0] > GAIN * best[1] else "torch"
