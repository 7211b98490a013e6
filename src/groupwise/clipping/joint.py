"""Joint norms: a parameter that several layers, or several calls of one layer, use has one gradient an example.

With uses a and b the norm is ‖a + b‖² = ‖a‖² + ‖b‖² + 2⟨a, b⟩. Adding the uses as if they were separate parameters
would under-state the norm by up to √2 for two uses: a privacy bug. Calls of one layer whose rows may follow each other
(T steps of a recurrence are one sequence) become one call, which costs what a sequence costs. For all others members
report the squares, and this file the rest.
"""

from dataclasses import dataclass
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from groupwise.clipping.products import inner_products
from groupwise.clipping.rules.base import LayerRule, rounding_slack, sum_of_squares, upcast
from groupwise.clipping.rules.embedding import EmbeddingRule
from groupwise.clipping.rules.hf_conv1d import HFConv1DRule
from groupwise.clipping.rules.linear import LinearRule
from groupwise.clipping.squared_norms import squared_row_norms

CHUNK_FLOATS = 1 << 24
"""Numbers that the per-example gradients of one chunk may hold where they have to be materialised."""


@dataclass
class Entry:
    """A book-kept call: the rule that takes it, its layer, what its forward saved and its output gradients."""

    rule: LayerRule
    member: Any
    saved: Any
    g: Any


@dataclass(frozen=True)
class Outer:
    """One example's weight gradient as Σ_t left_t rightᵀ_t: rows (B, T, p), or indices (B, T) for one-hot rows."""

    left: Tensor
    right: Tensor

    def inner(self, other: "Outer") -> Tensor:
        """⟨Σ_t l_t r_tᵀ, Σ_s l'_s r'_sᵀ⟩ = Σ_ts (l_t·l'_s)(r_t·r'_s) of each example, (B,), not under-stated."""
        products = (_products(self.left, other.left) * inner_products(self.right, other.right)).sum((1, 2))
        return products + rounding_slack(self._size() * other._size(), max(self.right.shape[1:]))

    def _size(self) -> Tensor:
        """Σ_t ‖l_t‖‖r_t‖, (B,): what the inner products are made of, before anything cancels."""
        lengths = self.right.norm(dim=2)
        return (lengths * self.left.norm(dim=2) if self.left.is_floating_point() else lengths).sum(1)


def stack_calls(entries: list[Entry]) -> tuple[list[Entry], list[Entry]]:
    """Calls of one layer become one call with all their rows, where its rule can do that.

    Returns:
        All entries, with those made of several calls in their places; and those whose norms nobody has formed yet.
    """
    calls: dict[int, list[Entry]] = {}
    for entry in entries:
        calls.setdefault(id(entry.member) if entry.rule.stacks else id(entry), []).append(entry)
    every, stacked = [], []
    for same in calls.values():
        entry = same[0]
        if entry.rule.stacks:
            if len(same) > 1:
                saved, g = entry.rule.stack([(e.saved, e.g) for e in same])
                entry = Entry(entry.rule, entry.member, saved, g)
            stacked.append(entry)
        every.append(entry)
    return every, stacked


def cross_terms(entries: list[Entry], like: Tensor) -> Tensor:
    """2Σ_{a<b}⟨g_a, g_b⟩ over pairs of uses of the same parameter, (B,); zeros where nothing is shared."""
    by_parameter: dict[int, list[tuple[Entry, int]]] = {}
    for entry in entries:
        for local, place in enumerate(entry.member.places):
            if place is not None:
                by_parameter.setdefault(place, []).append((entry, local))
    total = torch.zeros_like(like)
    for uses in by_parameter.values():
        if len(uses) < 2:
            continue
        outers = [_outer(entry, local) for entry, local in uses]
        if all(outer is not None for outer in outers):
            for a, b in combinations(outers, 2):
                total = total + 2 * a.inner(b)  # type: ignore[union-attr, arg-type]
        else:
            total = total + _materialized_cross_terms(uses, like)
    return total


def _outer(entry: Entry, local: int) -> Outer | None:
    rule = entry.rule
    if local != 0 or entry.member.rows or not isinstance(rule, LinearRule | EmbeddingRule):
        return None
    if isinstance(rule, EmbeddingRule):
        return Outer(*rule.rows(entry.saved, entry.g))
    x, g = rule.rows(entry.saved, entry.g)
    return Outer(x, g) if isinstance(rule, HFConv1DRule) else Outer(g, x)


def _products(a: Tensor, b: Tensor) -> Tensor:
    """(B, T, S) inner products of rows; an integer tensor stands for one-hot rows."""
    if a.is_floating_point() and b.is_floating_point():
        return inner_products(a, b)
    if not a.is_floating_point() and not b.is_floating_point():
        return a.unsqueeze(2) == b.unsqueeze(1)
    if b.is_floating_point():
        return _products(b, a).mT
    return a.gather(2, b.unsqueeze(1).expand(-1, a.shape[1], -1))


def _materialized_cross_terms(uses: list[tuple[Entry, int]], like: Tensor) -> Tensor:
    """The same from materialised per-example gradients, a few examples at a time."""
    only = [tuple(i == local for i in range(len(entry.member.wanted))) for entry, local in uses]
    parts_of = [entry.member.rows_of(local) for entry, local in uses]
    rows = max((part.stop for part in parts_of if part is not None), default=0)
    size = max(_size(entry, local) for entry, local in uses)
    step = max(1, CHUNK_FLOATS // size)
    parts = []
    for start in range(0, like.shape[0], step):
        some = slice(start, start + step)
        gradients = []
        for (entry, local), wanted, part in zip(uses, only, parts_of, strict=True):
            gradient = entry.rule.per_example_gradients(*entry.rule.examples(entry.saved, entry.g, some), wanted)[local]
            assert gradient is not None
            gradient = upcast(gradient)
            if part is not None:
                whole = gradient.new_zeros(len(gradient), rows, *gradient.shape[2:])
                whole[:, part] = gradient
                gradient = whole
            gradients.append(gradient.reshape(len(gradient), -1))
        longest = max(gradient.shape[1] for gradient in gradients)
        gradients = [torch.nn.functional.pad(gradient, (0, longest - gradient.shape[1])) for gradient in gradients]
        squares = sum_of_squares(tuple(gradients))
        joint = squared_row_norms(torch.stack(gradients).sum(0))
        parts.append(joint - squares + rounding_slack(squares, size, gradients[0].dtype))
    return torch.cat(parts)


def _size(entry: Entry, local: int) -> int:
    return entry.rule.module.get_parameter(entry.rule.parameter_names[local]).numel()
