"""Finds norms of GᵀX from inner products between rows: ‖GᵀX‖² = Σ (XXᵀ)∘(GGᵀ), without forming the gradient itself.

XXᵀ of the last input is kept for the next layer that reads the same (query, key, value). The same inner products give
those between two uses of one weight.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from groupwise.clipping.precision import rounding_slack

LEAST_SPLIT = 1 << 22
"""Products (B·T·d times T) from which a processor gains by leaving out a quarter of a symmetric matrix."""
LONGEST_SUM = 1024
"""Numbers of two rows that are multiplied and added up in one go. A library may add them up one after the other, which
can lose more of a long sum than `rounding_slack` allows for."""
CHUNK_FLOATS = 1 << 24
"""Numbers that the inner products of one chunk of examples may hold: long sequences must not fill the memory."""


def inner_products(a: Tensor, b: Tensor) -> Tensor:
    """ABᵀ (B, T, S) of a (B, T, d) and b (B, S, d), long rows a part at a time."""
    if a.shape[2] <= LONGEST_SUM:
        return torch.bmm(a, b.mT)
    parts = zip(a.split(LONGEST_SUM, 2), b.split(LONGEST_SUM, 2), strict=True)
    first, other = next(parts)
    products = torch.bmm(first, other.mT)
    for part, other in parts:
        torch.baddbmm(products, part, other.mT, out=products)
    return products


def self_products(x: Tensor) -> Tensor:
    """XXᵀ (B, T, T) of x (B, T, d); on a CPU the upper right quarter is copied from the lower left."""
    rows = x.shape[1]
    if x.device.type != "cpu" or rows < 32 or x.numel() * rows < LEAST_SPLIT:
        return inner_products(x, x)
    half = rows // 2
    products = x.new_empty(x.shape[0], rows, rows)
    products[:, half:] = inner_products(x[:, half:], x)
    products[:, :half, :half] = inner_products(x[:, :half], x[:, :half])
    products[:, :half, half:] = products[:, half:, :half].mT
    return products


class LastProducts:
    """XXᵀ of the last input asked for: layers that read the same input (query, key, value) share it."""

    def __init__(self) -> None:
        self._key: tuple[object, ...] | None = None
        self._kept: tuple[StorageWeakRef, Tensor] | None = None
        self.reused = 0

    def of(self, x: Tensor) -> Tensor:
        """XXᵀ (B, T, T) of x (B, T, d); not to be changed."""
        key = (x.data_ptr(), x.shape, x.stride(), x.dtype, x._version)
        # The input itself is not kept alive; while it lives, no other tensor can have its address.
        if self._kept is not None and key == self._key and not self._kept[0].expired():
            self.reused += 1
            return self._kept[1]
        products = self_products(x)
        self._key, self._kept = key, (StorageWeakRef(x.untyped_storage()), products)
        return products

    def clear(self) -> None:
        """Let go of what is held."""
        self._key = self._kept = None


def gram_norms(x: Tensor, g: Tensor, bias: bool, shared: LastProducts | None = None) -> Tensor:
    """‖GᵀX‖² (+ ‖Σ_t G‖² with bias) of each example; x (B, T, d), g (B, T, p) -> (B,), float64, not under-stated."""
    step = max(1, CHUNK_FLOATS // x.shape[1] ** 2)
    if step < x.shape[0]:
        parts = zip(x.split(step), g.split(step), strict=True)
        return torch.cat([gram_norms(x_part, g_part, bias) for x_part, g_part in parts])
    xx = self_products(x) if shared is None else shared.of(x)
    longest = max(x.shape[1], x.shape[2], g.shape[2])
    return norms_from_products(xx, self_products(g), bias, longest)


def norms_from_products(xx: Tensor, gg: Tensor, bias: bool, longest: int) -> Tensor:
    """The same from XXᵀ and GGᵀ, (B, T, T) each; `longest` is the largest number of terms in any of their sums."""
    squares = (torch.addcmul(gg, xx, gg) if bias else xx * gg).sum((1, 2))
    left, right = xx.diagonal(dim1=1, dim2=2).clamp_min(0) + float(bias), gg.diagonal(dim1=1, dim2=2).clamp_min(0)
    sizes = (left * right).sqrt_().sum(1)
    squares = squares.clamp_min_(0) + rounding_slack(sizes.square_(), longest)
    return squares.double() + _underflow(left, longest) + _underflow(right, longest)


def _underflow(lengths: Tensor, longest: int) -> Tensor:
    """Σ_ts |x_t·x_s| for squared lengths (B, T), (B,), times what was lost of inner products too small for float32."""
    return lengths.double().sqrt_().sum(1).square_() * (longest * torch.finfo(lengths.dtype).tiny)


@dataclass(frozen=True)
class OuterProducts:
    """One example's weight gradient as Σ_t left_t rightᵀ_t: rows (B, T, p), or indices (B, T) for one-hot rows."""

    left: Tensor
    right: Tensor

    def inner(self, other: "OuterProducts") -> Tensor:
        """⟨Σ_t l_t r_tᵀ, Σ_s l'_s r'_sᵀ⟩ = Σ_ts (l_t·l'_s)(r_t·r'_s) of each example, (B,), not under-stated."""
        products = (_products(self.left, other.left) * inner_products(self.right, other.right)).sum((1, 2))
        return products + rounding_slack(self._size() * other._size(), max(self.right.shape[1:]))

    def _size(self) -> Tensor:
        """Σ_t ‖l_t‖‖r_t‖, (B,): what the inner products are made of, before anything cancels."""
        lengths = self.right.norm(dim=2)
        return (lengths * self.left.norm(dim=2) if self.left.is_floating_point() else lengths).sum(1)


def _products(a: Tensor, b: Tensor) -> Tensor:
    """(B, T, S) inner products of rows; an integer tensor stands for one-hot rows."""
    if a.is_floating_point() and b.is_floating_point():
        return inner_products(a, b)
    if not a.is_floating_point() and not b.is_floating_point():
        return a.unsqueeze(2) == b.unsqueeze(1)
    if b.is_floating_point():
        return _products(b, a).mT
    return a.gather(2, b.unsqueeze(1).expand(-1, a.shape[1], -1))
