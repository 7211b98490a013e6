"""Estimates memory and time of any number of stages and any microbatch of one model on one kind of device."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

from groupwise.clipping.norm_methods import RATES
from groupwise.errors import UserError
from groupwise.pipeline.model_parts import find_parts
from groupwise.pipeline.runner import held_at_once
from groupwise.pipeline.split import Ranges, choose_ranges
from groupwise.planner.footprint import Footprint, Kind, Work, footprint
from groupwise.planner.options import PlanOptions
from groupwise.planner.shapes import build, configuration

MOMENTS = 2  # of Adam
UPDATE_PASSES = 10  # reads and writes of a trained number: noise, division, both moments, weight


@dataclass(frozen=True)
class Memory:
    """Bytes on one device; the parts that a step holds at its fullest moment add up to `peak`.

    Args:
        weights: frozen ones.
        state: of what trains: weights, gradients, and the optimiser's moments.
        activations: what microbatches in flight keep for their backward passes.
        working: what one forward or backward pass needs beside it.
        clipping: what clipping adds to that.
        buffers: where messages arrive, and those under way.
    """

    weights: int
    state: int
    activations: int
    working: int
    clipping: int
    buffers: int

    @property
    def peak(self) -> int:
        """All of it."""
        return self.weights + self.state + self.activations + self.working + self.clipping + self.buffers


def stage_memory(
    plain: Footprint, clipped: Footprint, stages: int, stage: int, microbatches: int, *, all_at_once: bool
) -> Memory:
    """The fullest moment of a stage's step.

    That is the first backward pass, or the forward pass before it, when the most microbatches are in flight.

    Args:
        plain: of the stage without clipping.
        clipped: with it.
        stages, stage, microbatches: S, s and J.
        all_at_once: whether the optimiser takes all parameters in one go, as on a GPU, and not one after the other.
    """
    flying = held_at_once(stages, stage, microbatches)
    under_way = clipped.received if microbatches > 1 else 0  # the gradient that was sent last
    messages = flying * (clipped.received + clipped.sent) + under_way

    def held(footprint: Footprint) -> tuple[int, int, int]:
        """Activations, working memory and messages at the fullest moment."""
        forward = (flying - 1) * footprint.stored, footprint.forward, messages
        backward = flying * footprint.stored, footprint.backward, messages
        update = 0, 2 * (footprint.trained if all_at_once else footprint.largest), 0
        return max(forward, backward, update, key=sum)

    activations, working, buffers = held(clipped)
    return Memory(
        weights=clipped.frozen,
        state=(2 + MOMENTS) * clipped.trained,
        activations=activations,
        working=working - (extra := max(0, working - held(plain)[1])),
        clipping=extra,
        buffers=buffers,
    )


class Times(NamedTuple):
    """Of one step of a pipeline, in seconds."""

    microbatches: int
    """J."""
    forward: tuple[float, ...]
    """Of a microbatch, by stage."""
    backward: tuple[float, ...]
    """The same, recomputation included."""
    per_device: float
    """Of a step in which every stage clips alone (Algorithm 2)."""
    flat: float
    """Of a step with flat clipping: norms of the whole batch first, then all of it again."""


def duration(microbatches: int, forward: Sequence[float], backward: Sequence[float], message: float) -> float:
    """Seconds until the last backward pass is done: one microbatch goes through all stages and back, and the slowest
    stage takes its J - 1 others meanwhile.

    Args:
        microbatches: J.
        forward: seconds of one microbatch's forward pass, by stage.
        backward: the same of its backward pass, recomputation included.
        message: seconds from one stage to the next.
    """
    through = sum(forward) + sum(backward) + 2 * (len(forward) - 1) * message
    return through + (microbatches - 1) * max(map(sum, zip(forward, backward, strict=True)))


def bubble_fraction(stages: int, microbatches: int) -> float:
    """(S - 1)/(J + S - 1): the share of the time that each of S equal stages waits (Huang et al., section 2.3)."""
    return (stages - 1) / (microbatches + stages - 1)


POSITIONS = ("max_position_embeddings", "n_positions")
IMAGINED_BLOCKS = 3


class Estimate:
    """Memory and time under `options`; a method may be given another work or number of stages.

    Args:
        options: checked ones.
        config: of the model, where `options.model` is only its name.

    Raises:
        UserError: a model that is not known or cannot be cut; more tokens than it has positions.
    """

    def __init__(self, options: PlanOptions, config: Any = None) -> None:
        self.options = options
        config = configuration(options.model) if config is None else config
        positions = next((n for key in POSITIONS if (n := getattr(config, key, None)) is not None), math.inf)
        if options.length > positions:
            raise UserError(f"length={options.length} is more than the {positions} positions of {options.model}.")
        self.work = Work(
            config,
            options.microbatch or 1,
            options.length,
            rank=options.rank,
            dtype=options.weights_dtype,
            rematerialize=options.rematerialize,
            rates=RATES[options.device.kind],
        )
        self.model = build(config, options.rank, options.weights_dtype)
        self.blocks = len(find_parts(self.model).blocks)
        self.imagined = lru_cache(None)(footprint)

    def footprint(self, work: Work, kind: Kind, name: str) -> Footprint:
        """Of a stage with passes `name` of `work.PASSES`; beyond three blocks each is as the third."""
        if kind.blocks <= IMAGINED_BLOCKS:
            return self.imagined(work, kind, name)
        before, last = (self.imagined(work, replace(kind, blocks=IMAGINED_BLOCKS - i), name) for i in (1, 0))
        more = kind.blocks - IMAGINED_BLOCKS
        return Footprint(**{key: value + more * (value - getattr(before, key)) for key, value in vars(last).items()})

    def ranges(self) -> Ranges:
        """Blocks of each stage, with even numbers of parameters."""
        return choose_ranges(self.model, self.options.devices)

    def microbatches(self, work: Work, stages: int) -> int:
        """J: enough for a logical batch, and at least one for each stage."""
        return max(-(-self.options.batch // work.microbatch), stages)

    # -- memory ---------------------------------------------------------------------------------------------------

    def memory(self, work: Work, ranges: Ranges, name: str = "device") -> list[Memory]:
        """The peak memory of each stage; `name` is a pass of `work.PASSES`, or flat."""
        count, together = self.microbatches(work, len(ranges)), self.options.device.kind == "cuda"

        def of(stage: int, kind: Kind, name: str) -> Memory:
            plain, clipped = self.footprint(work, kind, "none"), self.footprint(work, kind, name)
            return stage_memory(plain, clipped, len(ranges), stage, count, all_at_once=together)

        names = ("norms", "sums") if name == "flat" else (name,)
        return [
            max((of(stage, kind, name) for name in names), key=lambda memory: memory.peak)
            for stage, kind in enumerate(kinds(ranges))
        ]

    def fullest(self, work: Work) -> int:
        """The largest peak memory of a stage, in bytes, with per-device clipping."""
        return max(memory.peak for memory in self.memory(work, self.ranges()))

    def fits(self, work: Work) -> bool:
        """Whether every stage fits its device."""
        return self.fullest(work) <= self.options.room

    # -- time -----------------------------------------------------------------------------------------------------

    def seconds(self, work: Work, kind: Kind, name: str) -> tuple[float, float]:
        """Forward and backward of one microbatch at a stage of this kind, recomputation included.

        Operations over the achieved rate, but no less than it takes to read the weights once a pass. Kernels that move
        bytes and little else (norms of layers, softmax, clipping) are in the achieved rate, which is that of whole
        trainings. So clipping costs its operations here, and nothing for its small kernels.
        """
        device, found = self.options.device, self.footprint(work, kind, name)
        rate = device.peak[work.dtype if work.half else "float32"] * device.share
        reading = (found.frozen + found.trained) / device.bandwidth
        return (
            max(found.forward_operations / rate, reading),
            max(found.backward_operations / rate, reading * (1 + work.rematerialize)),
        )

    def times(self, work: Work, ranges: Ranges, name: str = "device") -> Times:
        """One step, its backward passes `name` of `work.PASSES`."""
        device, stages, count = self.options.device, kinds(ranges), self.microbatches(work, len(ranges))
        forward, backward = zip(*(self.seconds(work, kind, name) for kind in stages), strict=True)
        norms = tuple(self.seconds(work, kind, "norms")[1] for kind in stages) if name != "none" else backward
        found = [self.footprint(work, kind, name) for kind in stages]
        update = UPDATE_PASSES * max(of.trained for of in found) / device.bandwidth
        message = device.latency + max(of.sent for of in found) / device.link
        agree = device.latency * math.ceil(math.log2(len(ranges) + 1))  # an all-reduce of a few numbers

        def passes(backward: tuple[float, ...]) -> float:
            return duration(count, forward, backward, message) + agree

        per_device = passes(backward) + update
        return Times(count, forward, backward, per_device, passes(norms) + per_device)


def kinds(ranges: Ranges) -> list[Kind]:
    """The kind of each stage."""
    last = len(ranges) - 1
    return [Kind(stop - start, stage == 0, stage == last) for stage, (start, stop) in enumerate(ranges)]
