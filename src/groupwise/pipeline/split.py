"""Splits a model into stages of consecutive blocks, balanced by parameters."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import accumulate, pairwise
from typing import Any

from torch import nn

from groupwise.errors import UserError
from groupwise.pipeline.model_parts import ModelParts, find_parts
from groupwise.pipeline.stage import Stage, TextStage

Ranges = tuple[tuple[int, int], ...]
"""Blocks [start, stop) of each stage."""


def choose_ranges(model: nn.Module, stages: int, by_hand: Sequence[int] = ()) -> Ranges:
    """Assign the blocks of `model`, in their order and at least one each, to `stages` stages.

    The largest stage has as few parameters as possible, and the others are balanced. The embedding counts for the first
    stage and the head for the last.

    Args:
        model: as for `cut`.
        by_hand: the number of blocks of each stage, in place of balancing.

    Raises:
        UserError: more stages than blocks, or counts that do not add up.
    """
    anatomy = find_parts(model)
    blocks = len(anatomy.blocks)
    if not 1 <= stages <= blocks:
        raise UserError(f"{stages} stages cannot share {blocks} blocks: give 1 to {blocks}.")
    if by_hand:
        if len(by_hand) != stages or sum(by_hand) != blocks or min(by_hand) < 1:
            raise UserError(
                f"pipeline.blocks={list(by_hand)} must be {stages} positive counts that add up to {blocks}: correct it."
            )
        return tuple(pairwise(accumulate(by_hand, initial=0)))
    entry, *sizes, exit = (_count(part) for part in anatomy.parts)
    return even_out(sizes, stages, entry, exit)


def even_out(costs: Sequence[float], stages: int, entry: float = 0.0, exit: float = 0.0) -> Ranges:
    """Minimise the cost of the most expensive stage, then the sum of squared costs, by dynamic programming.

    Args:
        costs: of each block, (n,), n >= stages.
        entry, exit: costs of the first and the last stage in addition to their blocks.
    """
    sums = list(accumulate(costs, initial=0))
    table: dict[int, tuple[float, float, tuple[int, ...]]] = {0: (0.0, 0.0, ())}
    for stage in range(stages):
        ends = entry * (stage == 0) + exit * (stage == stages - 1)
        left = stages - stage - 1  # each later stage needs a block
        found = {}
        for stop in range(stage + 1, len(costs) - left + 1):
            options = []
            for start, (heaviest, squares, stops) in table.items():
                if start < stop:
                    load = sums[stop] - sums[start] + ends
                    options.append((max(heaviest, load), squares + load * load, (*stops, stop)))
            found[stop] = min(options)
        table = found
    return tuple(pairwise((0, *table[len(costs)][2])))


def _count(modules: Sequence[nn.Module]) -> int:
    return sum(p.numel() for p in {id(p): p for module in modules for p in module.parameters()}.values())


def cut(
    model: nn.Module,
    ranges: Ranges,
    index: int,
    *,
    rematerialize: bool = False,
    token_loss: str = "mean",
    precision: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> Stage:
    """Cut stage `index` out of `model`, which cannot be used afterwards: the other stages' modules are dropped.

    Args:
        model: a causal language model of transformers, bare or with peft's adapters inside; its parameters may be on
            the meta device.
        ranges: blocks [start, stop) of each stage.
        rematerialize: keep only each block's input for the backward pass, and run the block again there.
        token_loss: mean | sum over each example's own tokens.
        precision: makes the context of every forward pass, such as autocast.

    Raises:
        UserError: a model that cannot be split, a trainable parameter on two stages or on none, or a stage without
            trainable parameters.
    """
    anatomy = find_parts(model)
    _check_trainable(model, anatomy, ranges)
    modules = {id(module): name for name, module in model.named_modules()}
    stage = TextStage(anatomy, ranges, index, rematerialize=rematerialize, token_loss=token_loss, precision=precision)
    for name in stage.state_dict():
        module, _, leaf = name.rpartition(".")
        stage.names[name] = f"{modules[id(stage.get_submodule(module))]}.{leaf}".lstrip(".")
    return stage.train(model.training)


def _check_trainable(model: nn.Module, anatomy: ModelParts, ranges: Ranges) -> None:
    """Check that every trainable parameter is on one stage, and that every stage has one."""
    last = len(ranges) - 1
    stages = [0, *(stage for stage, (start, stop) in enumerate(ranges) for _ in range(start, stop)), last]
    places: dict[int, set[int]] = {}
    for stage, part in zip(stages, anatomy.parts, strict=True):
        for module in part:
            for parameter in module.parameters():
                places.setdefault(id(parameter), set()).add(stage)
    trainable = {name: places.get(id(p), set()) for name, p in model.named_parameters() if p.requires_grad}
    for name, found in trainable.items():
        if not found:
            raise UserError(f"Parameter {name!r} trains but belongs to no stage: freeze it.")
        if len(found) > 1:
            raise UserError(
                f"Parameter {name!r} trains on stages {min(found)} and {max(found)} at once, as token embedding and "
                "head: give model.untie=true, or freeze it (model.trains=lora)."
            )
    for stage in range(len(ranges)):
        if {stage} not in trainable.values():
            raise UserError(
                f"Stage {stage} has nothing to train: give fewer pipeline.stages, or other pipeline.blocks."
            )
