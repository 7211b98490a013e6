"""Cuts a model into stages of consecutive blocks; each stage keeps the model's own forward pass."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn

from groupwise.errors import UserError
from groupwise.pipeline.balance import Ranges, choose_ranges
from groupwise.pipeline.image_stage import ImageStage
from groupwise.pipeline.model_parts import Anatomy, dissect
from groupwise.pipeline.stage import Stage
from groupwise.pipeline.text_stage import TextStage

__all__ = ["Ranges", "Stage", "choose_ranges", "cut"]


def cut(
    model: nn.Module,
    ranges: Ranges,
    index: int,
    *,
    rematerialize: bool = False,
    token_loss: str = "mean",
    precision: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> Stage:
    """Take stage `index` out of `model`, which is used up: the other stages' modules are dropped.

    Args:
        model: a causal language model of transformers, bare or with peft's adapters inside, or a wide residual network;
            its parameters may be on the meta device.
        ranges: blocks [start, stop) of each stage.
        index: which of them.
        rematerialize: keep only each block's input for the backward pass, and run the block again there.
        token_loss: text: mean | sum over each example's own tokens.
        precision: makes the context of every forward pass; see `training.precision`.

    Raises:
        UserError: a model that cannot be cut, a parameter that would train on two stages or on none, or a stage where
            nothing trains.
    """
    anatomy = dissect(model)
    _check_ranges(anatomy, ranges)
    _check_trainable(model, anatomy, ranges)
    names = {id(module): name for name, module in model.named_modules()}
    kind = ImageStage if anatomy.family is None else TextStage
    stage = kind(anatomy, ranges, index, rematerialize=rematerialize, token_loss=token_loss, precision=precision)
    stage.remember(names)
    return stage.train(model.training)


def _check_ranges(anatomy: Anatomy, ranges: Ranges) -> None:
    ends = [0, *(stop for _, stop in ranges)]
    starts = [*(start for start, _ in ranges), len(anatomy.blocks)]
    if ends != starts or any(start >= stop for start, stop in ranges):
        raise UserError(f"Stages {ranges} do not hold each of the {len(anatomy.blocks)} blocks once: give others.")


def _check_trainable(model: nn.Module, anatomy: Anatomy, ranges: Ranges) -> None:
    """Every parameter that trains is on one stage, and every stage has one."""
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
                f"Parameter {name!r} trains on stages {min(found)} and {max(found)} at once, as token embedding and as "
                "head: give model.untie=true, or freeze it (model.trains=lora)."
            )
    for stage in range(len(ranges)):
        if {stage} not in trainable.values():
            raise UserError(f"Nothing trains on stage {stage}: give fewer pipeline.stages, or other pipeline.blocks.")
