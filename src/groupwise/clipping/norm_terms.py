"""Defers the small operations of norms and sums, so that those of several layers run as one.

A layer's squared norms (B,) take a dozen operations on few numbers. Each costs microseconds to launch (on a GPU, a
kernel), and hundreds of them dominate the step of a small batch. So a layer reports `Terms`: large tensors are reduced
already, and the rest is computed for all terms of one kind at once when the group closes.
"""

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from groupwise.clipping.factors import Factors, is_async_device
from groupwise.clipping.precision import floor, row_lengths, slack_of, squared_row_norms, sum_of_squares

FEW = 1 << 20
"""Entries that may be copied, or kept alive by a small view, to save a kernel."""

FEW_ON_CPU = 1 << 14
"""The limit on a CPU, where launching an operation costs less."""


class Terms(ABC):
    """Intermediate results from which one layer's squared norms are computed."""

    key: Hashable
    """Terms of the same class with equal keys are computed together."""
    squares: Tensor
    """The squared norms (B,), float64, once they are computed."""

    @classmethod
    @abstractmethod
    def squares_of(cls, terms: Sequence[Any]) -> Tensor:
        """Squared norms (n, B), float64, of n terms with the same key, never too small by rounding."""


class GramTerms(Terms):
    """‖GᵀX‖² = Σ (XXᵀ)∘(GGᵀ), with a bias Σ (XXᵀ + 1)∘(GGᵀ): the sum, and the diagonals that bound its rounding.

    XXᵀ and GGᵀ are (B, T, T). `longest` is the largest number of terms in any of the sums.
    """

    def __init__(self, xx: Tensor, gg: Tensor, bias: bool, longest: int) -> None:
        self.sums = (torch.addcmul(gg, xx, gg) if bias else xx * gg).sum((1, 2))
        self.bias, self.longest = bias, longest
        sides = xx.diagonal(dim1=1, dim2=2), gg.diagonal(dim1=1, dim2=2)
        few = xx.numel() <= FEW  # a diagonal is a view, which keeps the whole matrix in memory
        self.left, self.right = sides if few else torch.stack(sides).unbind()
        self.key = bias, self.left.shape, self.left.dtype

    @classmethod
    def squares_of(cls, terms: Sequence["GramTerms"]) -> Tensor:
        """The sums, raised by a bound on their rounding and on what underflows in their dtype."""
        n, dtype, device = len(terms), terms[0].left.dtype, terms[0].left.device
        lengths = torch.stack([term.left for term in terms] + [term.right for term in terms]).clamp_min_(0)
        if terms[0].bias:
            lengths[:n].add_(1)
        lengths.sqrt_()
        sizes = (lengths[:n] * lengths[n:]).sum(2).square_()
        torch._foreach_mul_(list(sizes.unbind()), [slack_of(term.longest, dtype, device) for term in terms])
        # Σ_ts |x_t·x_s| and Σ_ts |g_t·g_s|, times what inner products lose by underflow.
        lost = lengths.sum(2, dtype=torch.float64).square_()
        squares = lost[:n] + lost[n:]
        torch._foreach_mul_(list(squares.unbind()), [term.longest * torch.finfo(dtype).tiny for term in terms])
        return squares.add_(torch.stack([term.sums for term in terms]).clamp_min_(0)).add_(sizes)


class OneRowTerms(Terms):
    """‖g xᵀ‖² = ‖x‖²‖g‖² for rows x (B, d) and g (B, p), one position per example; a bias adds ‖g‖²."""

    def __init__(self, x: Tensor, g: Tensor, bias: bool) -> None:
        self.bias, self.left, self.right = bias, row_lengths(x), row_lengths(g)
        self.sizes = x.shape[1], g.shape[1], x.dtype
        self.key = bias, self.sizes, self.left.shape, self.left.dtype, self.right.dtype

    @classmethod
    def squares_of(cls, terms: Sequence["OneRowTerms"]) -> Tensor:
        """The products, each raised by a bound on squares that underflow."""
        left = torch.stack([term.left for term in terms]).double().square_()
        right = torch.stack([term.right for term in terms]).double().square_()
        d, p, dtype = terms[0].sizes
        return left.add_(floor(d, dtype) + terms[0].bias) * right.add_(floor(p, dtype))


class RowTerms(Terms):
    """Per-example gradients (B, *shape) of a layer's parameters, which the weighted sums use too."""

    def __init__(self, gradients: tuple[Tensor | None, ...]) -> None:
        self.gradients = gradients
        self.joined: Tensor | None = None
        """The gradients of all n terms that were computed together, (B, n, m)."""
        rows = [each for each in gradients if each is not None]
        few = sum(each.numel() for each in rows) <= (FEW if is_async_device(rows[0]) else FEW_ON_CPU)
        self.key = tuple(each is not None and (each.shape, each.dtype) for each in gradients) if few else id(self)

    @classmethod
    def squares_of(cls, terms: Sequence["RowTerms"]) -> Tensor:
        """The squared norms over all parameters of a layer."""
        if len(terms) == 1:
            return sum_of_squares(terms[0].gradients).unsqueeze(0)
        joined = torch.cat([rows.reshape(len(rows), -1) for t in terms for rows in t.gradients if rows is not None], 1)
        together = joined.view(len(joined), len(terms), joined.shape[1] // len(terms))
        for term in terms:
            term.joined = together
        return squared_row_norms(together.flatten(0, 1)).view(together.shape[:2]).t()

    def split(self, sums: Tensor) -> tuple[Tensor | None, ...]:
        """Split the sums (m,) of all parameters into one tensor per parameter."""
        parts = iter(sums.split([rows[0].numel() for rows in self.gradients if rows is not None]))
        return tuple(None if rows is None else next(parts).view(rows.shape[1:]) for rows in self.gradients)


def joined_sums(terms: Sequence[RowTerms], factors: Sequence[Factors]) -> list[tuple[Tensor | None, ...]]:
    """Σ_i factor_i · g_i for each layer and parameter of terms that were computed together, in their order."""
    rows = terms[0].joined
    assert rows is not None
    weights = torch.stack([each.values.to(rows.dtype) for each in factors])
    if any(each.dropped is not None for each in factors):
        rows.masked_fill_((weights == 0).t().unsqueeze(2), 0)  # since 0 · NaN is NaN
    sums = torch.bmm(weights.unsqueeze(1), rows.transpose(0, 1)).squeeze(1)
    return [term.split(row) for term, row in zip(terms, sums.unbind(), strict=True)]


def squares_together(reported: Sequence[Sequence[Terms | Tensor]]) -> list[Tensor]:
    """Squared norms (B,) of several groups, float64, from their layers' reports."""
    same: dict[Hashable, list[Terms]] = {}
    for terms in reported:
        for term in terms:
            if isinstance(term, Terms):
                same.setdefault((type(term), term.key), []).append(term)
    for alike in same.values():
        for term, squares in zip(alike, type(alike[0]).squares_of(alike).unbind(), strict=True):
            term.squares = squares
    totals = []
    for terms in reported:
        found = [term.squares if isinstance(term, Terms) else term for term in terms]
        totals.append(found[0] if len(found) == 1 else torch.stack(found).sum(0))
    return totals
