"""Puts off the small operations of norms and sums, until those of several layers can be done in one.

A layer's squared norms (B,) take a dozen operations on a few numbers each. Each takes microseconds to start, and on a
GPU a kernel: hundreds of them are what a step of a small batch waits for. So layers report `Terms`, whatever is large
reduced already, and a closing group (or several groups that close together) finishes all of one kind at once.
"""

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from groupwise.clipping.factors import Factors, is_async_device
from groupwise.clipping.precision import floor, row_lengths, slack_of, squared_row_norms, sum_of_squares

FEW = 1 << 20
"""Numbers that may be copied, or kept for the sake of a few of them, to save a kernel."""

FEW_ON_CPU = 1 << 14
"""The same on a CPU, where starting an operation costs less."""


class Terms(ABC):
    """What one layer's squared norms are made of."""

    key: Hashable
    """Terms of one class with equal keys are finished together."""

    @classmethod
    @abstractmethod
    def squares_of(cls, terms: Sequence[Any]) -> Tensor:
        """Squared norms (n, B), float64, of n terms with one key, never under-stated by rounding."""


class GramTerms(Terms):
    """‖GᵀX‖² = Σ (XXᵀ)∘(GGᵀ), with a bias Σ (XXᵀ + 1)∘(GGᵀ): the sum, and what its rounding is found from.

    Args:
        xx: XXᵀ (B, T, T).
        gg: GGᵀ (B, T, T).
        bias: the gradient of a bias, Σ_t G, counts too.
        longest: the largest number of terms in any of their sums.
    """

    def __init__(self, xx: Tensor, gg: Tensor, bias: bool, longest: int) -> None:
        self.sums = (torch.addcmul(gg, xx, gg) if bias else xx * gg).sum((1, 2))
        self.bias, self.longest = bias, longest
        sides = xx.diagonal(dim1=1, dim2=2), gg.diagonal(dim1=1, dim2=2)
        few = xx.numel() <= FEW  # a diagonal is a view, and keeps all of the products
        self.left, self.right = sides if few else torch.stack(sides).unbind()
        self.key = bias, self.left.shape, self.left.dtype

    @classmethod
    def squares_of(cls, terms: Sequence["GramTerms"]) -> Tensor:
        """The sums, raised by their rounding and by what is too small for their dtype."""
        n, dtype, device = len(terms), terms[0].left.dtype, terms[0].left.device
        lengths = torch.stack([term.left for term in terms] + [term.right for term in terms]).clamp_min_(0)
        if terms[0].bias:
            lengths[:n].add_(1)
        lengths.sqrt_()
        sizes = (lengths[:n] * lengths[n:]).sum(2).square_()
        torch._foreach_mul_(list(sizes.unbind()), [slack_of(term.longest, dtype, device) for term in terms])
        # Σ_ts |x_t·x_s| and Σ_ts |g_t·g_s|, times what is lost of inner products that are too small.
        lost = lengths.sum(2, dtype=torch.float64).square_()
        squares = lost[:n] + lost[n:]
        torch._foreach_mul_(list(squares.unbind()), [term.longest * torch.finfo(dtype).tiny for term in terms])
        return squares.add_(torch.stack([term.sums for term in terms]).clamp_min_(0)).add_(sizes)


class OneRowTerms(Terms):
    """‖g xᵀ‖² = ‖x‖²‖g‖² of rows x (B, d) and g (B, p), one position an example; the bias adds ‖g‖²."""

    def __init__(self, x: Tensor, g: Tensor, bias: bool) -> None:
        self.bias, self.left, self.right = bias, row_lengths(x), row_lengths(g)
        self.sizes = x.shape[1], g.shape[1], x.dtype
        self.key = bias, self.sizes, self.left.shape, self.left.dtype, self.right.dtype

    @classmethod
    def squares_of(cls, terms: Sequence["OneRowTerms"]) -> Tensor:
        """Products, each raised by what is too small to have a square."""
        left = torch.stack([term.left for term in terms]).double().square_()
        right = torch.stack([term.right for term in terms]).double().square_()
        d, p, dtype = terms[0].sizes
        return left.add_(floor(d, dtype) + terms[0].bias) * right.add_(floor(p, dtype))


class RowTerms(Terms):
    """Per-example gradients (B, *shape) of a layer's parameters, which serve for the weighted sums as well."""

    def __init__(self, gradients: tuple[Tensor | None, ...]) -> None:
        self.gradients = gradients
        self.joined: Tensor | None = None
        """The rows of all that were finished with it, (B, n, m)."""
        rows = [each for each in gradients if each is not None]
        few = sum(each.numel() for each in rows) <= (FEW if is_async_device(rows[0]) else FEW_ON_CPU)
        self.key = tuple(each is not None and (each.shape, each.dtype) for each in gradients) if few else id(self)

    @classmethod
    def squares_of(cls, terms: Sequence["RowTerms"]) -> Tensor:
        """Of all parameters of a layer together."""
        if len(terms) == 1:
            return sum_of_squares(terms[0].gradients).unsqueeze(0)
        joined = torch.cat([rows.reshape(len(rows), -1) for t in terms for rows in t.gradients if rows is not None], 1)
        together = joined.view(len(joined), len(terms), joined.shape[1] // len(terms))
        for term in terms:
            term.joined = together
        return squared_row_norms(together.flatten(0, 1)).view(together.shape[:2]).t()

    def split(self, sums: Tensor) -> tuple[Tensor | None, ...]:
        """From the sums (m,) of all parameters to each one's own."""
        parts = iter(sums.split([rows[0].numel() for rows in self.gradients if rows is not None]))
        return tuple(None if rows is None else next(parts).view(rows.shape[1:]) for rows in self.gradients)


def joined_sums(terms: Sequence[RowTerms], factors: Sequence[Factors]) -> list[tuple[Tensor | None, ...]]:
    """Σ_i factor_i · g_i for each layer and parameter, of terms that were finished together, in their order."""
    rows = terms[0].joined
    assert rows is not None
    weights = torch.stack([each.values.to(rows.dtype) for each in factors])
    if any(each.dropped is not None for each in factors):
        rows.masked_fill_((weights == 0).t().unsqueeze(2), 0)  # whatever they hold: 0 · NaN is NaN
    sums = torch.bmm(weights.unsqueeze(1), rows.transpose(0, 1)).squeeze(1)
    return [term.split(row) for term, row in zip(terms, sums.unbind(), strict=True)]


def squares_together(reported: Sequence[Sequence[Terms | Tensor]]) -> list[Tensor]:
    """Squared norms (B,) of several groups, float64, from what the layers of each have reported."""
    same: dict[Hashable, list[Terms]] = {}
    for term in (term for terms in reported for term in terms if isinstance(term, Terms)):
        same.setdefault((type(term), term.key), []).append(term)
    done: dict[int, Tensor] = {}
    for terms in same.values():
        done |= zip(map(id, terms), type(terms[0]).squares_of(terms).unbind(), strict=True)
    found = [[done[id(term)] if isinstance(term, Terms) else term for term in terms] for terms in reported]
    return [squares[0] if len(squares) == 1 else torch.stack(squares).sum(0) for squares in found]
