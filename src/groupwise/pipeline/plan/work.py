"""One microbatch at one stage, to be imagined or timed: the pipeline's own stage and engine on rows made up here."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from groupwise.clipping import attach, flat, per_layer
from groupwise.clipping.cost_model import USUAL_RATES, Rates
from groupwise.pipeline.plan.shapes import build, with_blocks
from groupwise.pipeline.split import Stage, cut

PASSES = {"none": None, "device": flat, "layer": per_layer, "norms": flat, "sums": flat}
"""What a backward pass does → the partition of its stage's layers: no clipping, one group a stage, one group a layer;
and the two passes of flat clipping over all stages, of which the first makes norms and the second sums."""


@dataclass(frozen=True)
class Work:
    """What every stage is asked to do, as far as it decides on bytes and operations.

    Args:
        config: transformers' configuration of the whole model.
        microbatch: b.
        length: T.
        places: how many tokens of an example the loss is on.
        rank, targets, dtype, attention: see `shapes.build`.
        rematerialize: as `split.cut` takes it.
        rates: of the device's arithmetic, by which layers choose their formula.
    """

    config: Any = field(compare=False)
    microbatch: int
    length: int
    places: int
    rank: int = 32
    targets: tuple[str, ...] = ()
    dtype: str = "float32"
    attention: str = "sdpa"
    rematerialize: bool = True
    rates: Rates = USUAL_RATES["cuda"]

    @property
    def half(self) -> bool:
        """Whether frozen weights are narrower than what trains, so that passes run under autocast."""
        return self.rank > 0 and self.dtype != "float32"


@dataclass(frozen=True)
class Kind:
    """All stages of so many blocks are alike, but for the embedding in front and the head at the end."""

    blocks: int
    first: bool
    last: bool


def cut_out(work: Work, kind: Kind, device: str = "meta") -> Stage:
    """A stage of this kind, out of a model of just the blocks that it takes to have one; random weights."""
    before, after = int(not kind.first), int(not kind.last)
    stops = [*[1] * before, before + kind.blocks, *[before + kind.blocks + 1] * after]
    model = build(
        with_blocks(work.config, stops[-1]),
        rank=work.rank,
        targets=work.targets,
        dtype=work.dtype,
        attention=work.attention,
        device=device,
    )
    ranges = tuple(zip([0, *stops[:-1]], stops, strict=True))
    precision = partial(torch.autocast, "cpu", getattr(torch, work.dtype)) if work.half else nullcontext
    return cut(model, ranges, before, rematerialize=work.rematerialize, precision=precision)


def inputs(stage: Stage, work: Work) -> tuple[Tensor, dict[str, Tensor]]:
    """What a stage reads first, and its other arguments; a token of each row is padding, as mostly it is."""
    b, length, places = work.microbatch, work.length, work.places
    mask = torch.ones(b, length, dtype=torch.long)
    mask[:, -1:] = 0
    kwargs = {
        "attention_mask": mask,
        "position_ids": torch.arange(length).repeat(b, 1),
        "places": torch.arange(places).repeat(b, 1),
        "labels": torch.randint(0, work.config.vocab_size, (b, places)),
        "weights": torch.ones(b),
    }
    if stage.first:
        return torch.randint(0, work.config.vocab_size, (b, length)), kwargs
    return torch.randn(stage.activation(b, length, before=True)).to(stage.dtype).requires_grad_(), kwargs


class Passes:
    """One microbatch at a time through one stage.

    Args:
        stage: from `cut_out`.
        work: what it was cut out for.
        name: one of `PASSES`.
    """

    def __init__(self, stage: Stage, work: Work, name: str) -> None:
        self.stage, self._work, self._name = stage, work, name
        partition = PASSES[name]
        self._engine = None if partition is None else attach(stage, partition(stage), 1.0, rates=work.rates)
        if self._engine is not None:
            self._engine.asks_order = False  # the rows are nobody's

    def forward(self, x: Tensor, kwargs: dict[str, Tensor]) -> Tensor:
        """What the stage sends on, or losses."""
        with nullcontext() if self._engine is None else self._engine.forward_of(0):
            return self.stage(x, **kwargs)

    def backward(self, out: Tensor, gradient: Tensor | None) -> None:
        """From what `forward` returned; the gradient is None on the last stage."""
        with self._clipped():
            torch.autograd.backward(out.sum() if gradient is None else out, gradient)

    def _clipped(self) -> AbstractContextManager[object]:
        if self._engine is None:
            return nullcontext()
        passes = {"norms": self._engine.norms_of, "sums": self._engine.sums_of}
        return passes.get(self._name, self._engine.backward_of)(0, self._work.microbatch)
