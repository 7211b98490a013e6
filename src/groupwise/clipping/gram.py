"""Computes norms of GᵀX, and inner products of two such matrices, from inner products of rows."""

from dataclasses import dataclass

import torch
from torch import Tensor

from groupwise.clipping.matmul import batched
from groupwise.clipping.norm_terms import GramTerms, Terms, squares_together
from groupwise.clipping.precision import batched_product, keeps_half, longest_sum, rounding_slack, upcast

CHUNK_FLOATS = 1 << 24
"""Entries that the inner products, or gradients, of one chunk of examples may hold, to limit memory."""


def inner_products(a: Tensor, b: Tensor) -> Tensor:
    """ABᵀ (B, T, S) of a (B, T, d) and b (B, S, d); long rows are multiplied in parts."""
    most = longest_sum(a.device)
    if a.shape[2] <= most:
        return batched(a, b.mT) if a.dtype == b.dtype == torch.float32 else batched_product(a, b.mT)
    parts = zip(a.split(most, 2), b.split(most, 2), strict=True)
    first, other = next(parts)
    products = batched_product(first, other.mT)
    for part, other in parts:
        if keeps_half(part, other):
            products += batched_product(part, other.mT)
        else:
            torch.baddbmm(products, upcast(part), upcast(other).mT, out=products)
    return products


def gram_norms(x: Tensor, g: Tensor, bias: bool) -> Tensor:
    """‖GᵀX‖² (+ ‖Σ_t G‖² with bias) of each example; x (B, T, d), g (B, T, p) -> (B,), float64, never too small."""
    return squares_together([[gram_terms(x, g, bias)]])[0]


def gram_terms(x: Tensor, g: Tensor, bias: bool) -> Terms | Tensor:
    """As `gram_norms`, but may return terms to compute the norms from later."""
    step = max(1, CHUNK_FLOATS // max(1, x.shape[1] ** 2))
    if step < x.shape[0]:
        parts = zip(x.split(step), g.split(step), strict=True)
        return torch.cat([gram_norms(x_part, g_part, bias) for x_part, g_part in parts])
    return GramTerms(inner_products(x, x), inner_products(g, g), bias, max(x.shape[1], x.shape[2], g.shape[2]))


def norms_from_products(xx: Tensor, gg: Tensor, longest: int) -> Tensor:
    """‖GᵀX‖² from XXᵀ and GGᵀ, (B, T, T) each; `longest` is the largest number of terms in any sum."""
    return squares_together([[GramTerms(xx, gg, False, longest)]])[0]


@dataclass(frozen=True)
class OuterProducts:
    """One example's weight gradient as Σ_t left_t rightᵀ_t: rows (B, T, p), or indices (B, T) for one-hot rows."""

    left: Tensor
    right: Tensor

    def inner(self, other: "OuterProducts") -> Tensor:
        """⟨Σ_t l_t r_tᵀ, Σ_s l'_s r'_sᵀ⟩ = Σ_ts (l_t·l'_s)(r_t·r'_s) of each example, (B,), never too small."""
        products = (_products(self.left, other.left) * inner_products(self.right, other.right)).sum((1, 2))
        return products + rounding_slack(self._size() * other._size(), max(self.right.shape[1:]))

    def _size(self) -> Tensor:
        """Σ_t ‖l_t‖‖r_t‖, (B,): the size of the inner products if nothing cancels."""
        lengths = _lengths(self.right)
        if self.left.is_floating_point():
            lengths = lengths * _lengths(self.left)
        return lengths.sum(1)


def _lengths(rows: Tensor) -> Tensor:
    """‖row‖ (B, T) of rows (B, T, n), at least float32."""
    return torch.linalg.vector_norm(rows, dim=2, dtype=torch.promote_types(rows.dtype, torch.float32))


def _products(a: Tensor, b: Tensor) -> Tensor:
    """(B, T, S) inner products of rows; an integer tensor stands for one-hot rows."""
    if a.is_floating_point() and b.is_floating_point():
        return inner_products(a, b)
    if not a.is_floating_point() and not b.is_floating_point():
        return a.unsqueeze(2) == b.unsqueeze(1)
    if b.is_floating_point():
        return _products(b, a).mT
    return a.gather(2, b.unsqueeze(1).expand(-1, a.shape[1], -1))
