"""Chooses how many blocks each stage gets, so that the heaviest stage is as light as it can be."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

from torch import nn

from groupwise.errors import UserError
from groupwise.pipeline.model_parts import dissect

Ranges = tuple[tuple[int, int], ...]
"""Blocks [start, stop) of each stage."""


def choose_ranges(
    model: nn.Module,
    stages: int,
    balance: str = "parameters",
    by_hand: Sequence[int] = (),
    costs: Sequence[float] | None = None,
) -> Ranges:
    """Share out the blocks of `model`, in their order and at least one each, to `stages` stages.

    The embedding weighs on the first stage and the head on the last. Of all ways with the lightest heaviest stage, it
    is that with the least sum of squares, which evens out the others.

    Args:
        model: as `cut` takes it; on the meta device, for "parameters".
        stages: S.
        balance: parameters | time: what is to be even.
        by_hand: how many blocks each stage gets, instead of balancing.
        costs: for "time", seconds of the embedding, of each of n blocks and of the head, (n + 2,); see `timing.py`.

    Raises:
        UserError: more stages than blocks, counts that do not add up, an unknown `balance`, or no costs where needed.
    """
    anatomy = dissect(model)
    blocks = len(anatomy.blocks)
    if not 1 <= stages <= blocks:
        raise UserError(f"pipeline.stages={stages} does not suit a model of {blocks} blocks: give 1 to {blocks}.")
    if by_hand:
        if len(by_hand) != stages or sum(by_hand) != blocks or min(by_hand) < 1:
            raise UserError(
                f"pipeline.blocks={list(by_hand)} is not a count for each of {stages} stages that add up to the "
                f"model's {blocks} blocks: correct it."
            )
        return tuple(pairwise(accumulate(by_hand, initial=0)))
    if balance == "parameters":
        costs = [_count(part) for part in anatomy.parts]
    elif balance != "time":
        raise UserError(f"pipeline.balance={balance} is not one of parameters, time.")
    elif costs is None or len(costs) != blocks + 2:
        raise UserError(f"pipeline.balance=time needs measured costs of embedding, {blocks} blocks and head.")
    return even_out(costs[1:-1], stages, costs[0], costs[-1])


def even_out(costs: Sequence[float], stages: int, entry: float = 0.0, exit: float = 0.0) -> Ranges:
    """Exact: the least cost of the heaviest stage, then the least sum of squares; both by dynamic programming.

    Args:
        costs: of each block, (n,), n >= stages.
        stages: S.
        entry: what the first stage has beside its blocks.
        exit: what the last stage has beside its blocks.
    """
    sums = list(accumulate(costs, initial=0))

    def load(stage: int, start: int, stop: int) -> float:
        ends = entry * (stage == 0) + exit * (stage == stages - 1)
        return sums[stop] - sums[start] + ends

    heaviest, _ = _best(load, len(costs), stages, max)

    def squares(stage: int, start: int, stop: int) -> float:
        own = load(stage, start, stop)
        return own * own if own <= heaviest else math.inf

    _, stops = _best(squares, len(costs), stages, lambda before, own: before + own)
    return tuple(pairwise((0, *stops)))


def _best(
    cost: Callable[[int, int, int], float], blocks: int, stages: int, join: Callable[[float, float], float]
) -> tuple[float, tuple[int, ...]]:
    """The least joined cost of stages 0 ... S - 1, and where each of them stops."""
    table: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}
    for stage in range(stages):
        left = stages - stage - 1  # stages to come, with a block each
        table = {
            stop: min(
                (join(table[start][0], cost(stage, start, stop)), (*table[start][1], stop))
                for start in table
                if start < stop
            )
            for stop in range(stage + 1, blocks - left + 1)
        }
    return table[blocks]


def _count(modules: Sequence[nn.Module]) -> int:
    return sum(p.numel() for p in {id(p): p for module in modules for p in module.parameters()}.values())
