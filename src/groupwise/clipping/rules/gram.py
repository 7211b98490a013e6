"""Norms of GᵀX from inner products: ‖GᵀX‖² = Σ (XXᵀ)∘(GGᵀ), which never forms the gradient itself."""

import torch
from torch import Tensor

from groupwise.clipping.products import LastProducts, self_products
from groupwise.clipping.rules.base import rounding_slack

CHUNK_FLOATS = 1 << 24
"""Numbers that the inner products of one chunk of examples may hold: long sequences must not fill the memory."""


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
