"""Puts off the small operations of norms and sums, until those of several layers can be done in one.

A layer's squared norms (B,) take a dozen operations on a few numbers each. Each takes microseconds to start, and on a
GPU a kernel: hundreds of them are what a step of a small batch waits for. So layers report `Terms`, whatever is large
reduced already, and a closing group (or several groups that close together) finishes all of one kind at once.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from groupwise.clipping.factors import starts_kernels, weigh_rows
from groupwise.clipping.precision import slack_of, squared_row_norms

FEW = 1 << 20
"""Numbers that may be copied, or kept for the sake of a few of them, to save a kernel."""

FEW_LAYERS = 4
"""Layers a group whose squares are added up place by place, for all groups at once."""


class Terms(ABC):
    """What one layer's squared norms are made of."""

    @property
    @abstractmethod
    def key(self) -> Hashable:
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

    @property
    def key(self) -> Hashable:
        """Whether there is a bias, and the sizes."""
        return self.bias, self.left.shape, self.left.dtype

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


@dataclass
class RowTerms(Terms):
    """Per-example gradients (B, *shape) of a layer's parameters; called with factors, their weighted sums."""

    gradients: tuple[Tensor | None, ...]
    _together: tuple[Tensor, int] | None = None
    """The rows of all that were finished with it, (B, n, m), and its place among them."""

    def __call__(self, factors: Tensor) -> tuple[Tensor | None, ...]:
        return tuple(None if rows is None else weigh_rows(factors, rows) for rows in self.gradients)

    @property
    def rows(self) -> list[Tensor]:
        """Those that are wanted, (B, m_j)."""
        return [each.flatten(1) if each.dim() > 1 else each.unsqueeze(1) for each in self.gradients if each is not None]

    @property
    def few(self) -> bool:
        """Whether they may be copied."""
        return sum(each.numel() for each in self.gradients if each is not None) <= FEW

    @property
    def key(self) -> Hashable:
        """The sizes; where joining saves no kernel, nothing is joined."""
        rows = self.rows
        return tuple((each.shape, each.dtype) for each in rows) if starts_kernels(rows[0]) else id(self)

    @property
    def joined(self) -> bool:
        """Whether it was finished together with others, so that the sums can be, too."""
        return self._together is not None

    @classmethod
    def squares_of(cls, terms: Sequence["RowTerms"]) -> Tensor:
        """Of all parameters of a layer together."""
        every = [rows for term in terms for rows in term.rows]
        joined = every[0] if len(every) == 1 else torch.cat(every, 1)
        together = joined.view(len(joined), len(terms), joined.shape[1] // len(terms))
        if len(terms) > 1:
            for i, term in enumerate(terms):
                term._together = together, i
        return squared_row_norms(together.flatten(0, 1)).view(together.shape[:2]).t()

    @classmethod
    def sums_of(cls, terms: Sequence["RowTerms"], factors: Sequence[Tensor]) -> list[tuple[Tensor | None, ...]] | None:
        """Σ_i factor_i · g_i for each layer and parameter, from factors (B,) each; None if they were not finished in
        this order together."""
        found = [term._together for term in terms]
        rows = found[0][0] if found[0] is not None else None
        if rows is None or any(each is None or each[0] is not rows or each[1] != i for i, each in enumerate(found)):
            return None
        weights = torch.stack([each.to(rows.dtype) for each in factors])
        rows.masked_fill_((weights == 0).t().unsqueeze(2), 0)  # whatever they hold: 0 · NaN is NaN
        sums = torch.bmm(weights.unsqueeze(1), rows.transpose(0, 1)).squeeze(1)
        return [term._split(row) for term, row in zip(terms, sums.unbind(), strict=True)]

    def _split(self, sums: Tensor) -> tuple[Tensor | None, ...]:
        """From the sums (m,) of all parameters to each one's own."""
        ends = pairwise(accumulate((0 if g is None else math.prod(g.shape[1:]) for g in self.gradients), initial=0))
        shapes = [None if gradient is None else gradient.shape[1:] for gradient in self.gradients]
        return tuple(
            None if shape is None else sums[start:end].view(shape)
            for shape, (start, end) in zip(shapes, ends, strict=True)
        )


def squares_together(reported: Sequence[Sequence[Terms | Tensor]]) -> list[Tensor]:
    """Squared norms (B,) of several groups, float64, from what the layers of each have reported."""
    same: dict[Hashable, list[Terms]] = {}
    for term in (term for terms in reported for term in terms if isinstance(term, Terms)):
        same.setdefault((type(term), term.key), []).append(term)
    done: dict[int, Tensor] = {}
    for terms in same.values():
        done |= zip(map(id, terms), type(terms[0]).squares_of(terms).unbind(), strict=True)
    found = [[done[id(term)] if isinstance(term, Terms) else term for term in terms] for terms in reported]
    if len(found) < 2 or max(map(len, found)) > FEW_LAYERS:
        return [squares[0] if len(squares) == 1 else torch.stack(squares).sum(0) for squares in found]
    totals = torch.stack([squares[0] for squares in found]).unbind()
    for place in range(1, max(map(len, found))):
        more = [(total, squares[place]) for total, squares in zip(totals, found, strict=True) if len(squares) > place]
        torch._foreach_add_([total for total, _ in more], [squares for _, squares in more])
    return list(totals)
