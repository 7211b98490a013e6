"""Closes groups whose layers have all reported: norms, factors and sums, at once for those that close together."""

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from groupwise.clipping.groups import Member, factors_together
from groupwise.clipping.microbatches import GroupPass, Phase
from groupwise.clipping.norm_terms import RowTerms, squares_together
from groupwise.clipping.parts import add_up
from groupwise.clipping.rules.base import IndexedSum


def close(passes: Sequence[GroupPass]) -> list[Tensor | None]:
    """The layers of groups that close together have reported: form factors, and the clipped sums of all their inputs.

    Raises:
        UserError: see `GroupPass.begin_closing`.
    """
    there = [each for each in passes if each.begin_closing()]
    current = there[0].running if there else None
    if current is not None and current.phase in (Phase.NORMS, Phase.CLIP):
        waiting = [each for each in there if not each.done]
        squares = total_squares(waiting)
        if current.phase is Phase.CLIP:
            _add_sums(waiting, squares)
        current.squared_norms |= {each.group.index: rows for each, rows in zip(waiting, squares, strict=True)}
        current.squared_norms |= {each.group.index: _joined(each.squares) for each in there if each.done}
    return [total for each in passes for total in each.take_sums()]


def total_squares(passes: Sequence[GroupPass]) -> list[Tensor]:
    """Squared norms (examples,) of each group, from what its layers have reported, here and in other processes."""
    for each in passes:
        each.report_joint()
    squares = squares_together([each.terms for each in passes])
    for each in passes:
        each.terms = []
    return add_up(squares, [each.group.parts for each in passes])


def _add_sums(passes: Sequence[GroupPass], squares: list[Tensor]) -> None:
    """Factors from the norms, and with them the sums that are due."""
    factors = factors_together([each.group for each in passes], squares)
    same: dict[Hashable, list[tuple[GroupPass, Member, RowTerms, Tensor]]] = {}
    for each, weights in zip(passes, factors, strict=True):
        indexed: list[tuple[Member, IndexedSum]] = []
        while each.due:  # what a layer kept is freed as soon as its sum is made
            member, finish = each.due.pop()
            if isinstance(finish, RowTerms) and finish.joined:
                same.setdefault(finish.key, []).append((each, member, finish, weights))
            elif isinstance(finish, IndexedSum):
                indexed.append((member, finish))
            else:
                each.add(member, finish(weights))
        for member, finish in indexed:  # they need not be made whole where the parameter has a sum already
            each.add_rows(member, finish, weights)
    for rows in same.values():
        terms, weighing = [finish for _, _, finish, _ in rows], [weights for _, _, _, weights in rows]
        sums = RowTerms.sums_of(terms, weighing) or [
            finish(weights) for finish, weights in zip(terms, weighing, strict=True)
        ]
        for (each, member, _, _), total in zip(rows, sums, strict=True):
            each.add(member, total)


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)
