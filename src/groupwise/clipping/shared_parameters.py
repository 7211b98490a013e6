"""Computes joint norms of parameters that several layers, or several calls of one layer, use (tied weights).

With uses a and b the norm is ‖a + b‖² = ‖a‖² + ‖b‖² + 2⟨a, b⟩. Adding the uses as if they were separate parameters
would make the norm up to √2 too small for two uses: a privacy bug. Calls of one layer are stacked into one call if its
rule can do that (the T steps of a recurrence become one sequence). Otherwise each call reports its own square, and this
module computes the cross terms: from outer products if both rules give them (`outer_products`), else from per-example
gradients.
"""

from dataclasses import replace
from itertools import combinations, pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from groupwise.clipping.gram import CHUNK_FLOATS, OuterProducts
from groupwise.clipping.groups import LayerCall
from groupwise.clipping.precision import rounding_slack, squared_row_norms, sum_of_squares, upcast


def overlap(uses: list[slice | None]) -> bool:
    """Whether two uses of a parameter overlap; a use is a slice of its rows, or None for all."""
    known = sorted((use.start, use.stop) for use in uses if use is not None)
    some_take_all = len(known) < len(uses)
    return len(uses) > 1 and (some_take_all or any(end > start for (_, end), (start, _) in pairwise(known)))


def stack_calls(calls: list[LayerCall]) -> tuple[list[LayerCall], list[LayerCall]]:
    """Stack the calls of each layer into one call with all their rows, if its rule can do that. Returns all calls after
    stacking, and those whose norms have not been computed yet."""
    by_layer: dict[int, list[LayerCall]] = {}
    for call in calls:
        by_layer.setdefault(id(call.member) if call.rule.stacks else id(call), []).append(call)
    every = []
    for first, *others in by_layer.values():
        if others:
            saved, g = first.rule.stack([(call.saved, call.g) for call in (first, *others)])
            first = replace(first, saved=saved, g=g)
        every.append(first)
    return every, [call for call in every if call.rule.stacks]


def cross_terms(calls: list[LayerCall], examples: int) -> list[Tensor]:
    """The terms of 2Σ_{a<b}⟨g_a, g_b⟩ over pairs of uses of the same parameter, (B,) each; [] if nothing is shared.
    The calls are those of one group, and may have several rows for each of the B examples."""
    by_parameter: dict[int, list[tuple[LayerCall, int]]] = {}
    for call in calls:
        for local, parameter in enumerate(call.member.parameters):
            if parameter is not None:
                by_parameter.setdefault(id(parameter), []).append((call, local))
    total: list[Tensor] = []
    for uses in by_parameter.values():
        if len(uses) < 2:
            continue
        products = [_outer_products(call, local) for call, local in uses]
        known = [outer for outer in products if outer is not None]
        if len(known) == len(uses):
            total += [a.inner(b).double().mul_(2) for a, b in combinations(known, 2)]
        else:
            total.append(_materialized_cross_terms(uses, examples))
    return total


def _outer_products(call: LayerCall, local: int) -> OuterProducts | None:
    if local != 0 or any(call.member.rows):  # for a part of a weight, row indices would not match
        return None
    return call.rule.outer_products(call.saved, call.g)


def _materialized_cross_terms(uses: list[tuple[LayerCall, int]], examples: int) -> Tensor:
    """The same from per-example gradients, formed a few examples at a time."""
    only = [tuple(i == local for i in range(len(call.member.wanted))) for call, local in uses]
    parts_of = [call.member.rows[local] for call, local in uses]
    size = max(call.rule.size(wanted) for (call, _), wanted in zip(uses, only, strict=True))
    step = max(1, CHUNK_FLOATS // size)
    parts = []
    for start in range(0, examples, step):
        some = slice(start, start + step)
        gradients = []
        for (call, local), wanted, part in zip(uses, only, parts_of, strict=True):
            gradient = call.rule.per_example_gradients(*call.rule.examples(call.saved, call.g, some), wanted)[local]
            assert gradient is not None
            flat = upcast(gradient).flatten(1)
            before = 0 if part is None else part.start * flat.shape[1] // (part.stop - part.start)
            gradients.append(F.pad(flat, (before, 0)))
        longest = max(gradient.shape[1] for gradient in gradients)
        gradients = [F.pad(gradient, (0, longest - gradient.shape[1])) for gradient in gradients]
        squares = sum_of_squares(tuple(gradients))
        joint = squared_row_norms(torch.stack(gradients).sum(0))
        parts.append(joint - squares + rounding_slack(squares, size, gradients[0].dtype))
    return torch.cat(parts)
