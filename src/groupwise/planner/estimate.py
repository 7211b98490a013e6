"""Estimates memory and time of one model on one kind of device, for any number of stages and any microbatch."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

from groupwise.errors import UserError
from groupwise.pipeline.runner import held_at_once
from groupwise.pipeline.split import choose_ranges
from groupwise.planner.footprint import Footprint, Kind, Work, footprint
from groupwise.planner.options import PlanOptions
from groupwise.planner.shapes import build, configuration

MOMENTS = 2  # of Adam
UPDATE_PASSES = 10  # reads and writes per trained number: noise, division, both moments, weight


@dataclass(frozen=True)
class Memory:
    """Bytes on one device when a step needs the most memory; the parts add up to `peak`.

    Args:
        weights: frozen weights.
        state: trained weights, their gradients, and the optimiser's moments.
        activations: stored by microbatches in flight for their backward passes.
        working: other memory of one forward or backward pass.
        clipping: additional memory for clipping.
        buffers: messages that are received or being sent.
    """

    weights: int
    state: int
    activations: int
    working: int
    clipping: int
    buffers: int

    @property
    def peak(self) -> int:
        """The sum of all parts."""
        return self.weights + self.state + self.activations + self.working + self.clipping + self.buffers


def stage_memory(plain: Footprint, clipped: Footprint, stages: int, stage: int, microbatches: int) -> Memory:
    """Return the memory of a stage when its step needs the most.

    That is in the first backward pass or the forward pass before it, when most microbatches are in flight, or in the
    update. ``plain`` is the stage's footprint without clipping; ``stages``, ``stage`` and ``microbatches`` are S, s, J.
    """
    flying = held_at_once(stages, stage, microbatches)
    under_way = clipped.received if microbatches > 1 else 0  # the last gradient sent
    messages = flying * (clipped.received + clipped.sent) + under_way

    def held(footprint: Footprint) -> tuple[int, int, int]:
        """Activations, working memory and messages when they need the most memory."""
        forward = (flying - 1) * footprint.stored, footprint.forward, messages
        backward = flying * footprint.stored, footprint.backward, messages
        update = 0, footprint.trained, 0  # torch's Adam takes the roots of all second moments at once
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
    """The times of one pipeline step, in seconds."""

    microbatches: int
    """J."""
    forward: tuple[float, ...]
    """Forward pass of a microbatch, for each stage."""
    backward: tuple[float, ...]
    """Backward pass of a microbatch, for each stage, recomputation included."""
    per_device: float
    """A step with per-device clipping (Algorithm 2)."""
    flat: float
    """A step with flat clipping: one pass over the whole batch for norms, and a second one for sums."""


def duration(microbatches: int, forward: Sequence[float], backward: Sequence[float], message: float) -> float:
    """Return the seconds until the last backward pass ends: one microbatch passes all stages forward and backward, and
    the slowest stage processes the other J - 1. Arguments as in `Times`; ``message`` is the seconds for one message."""
    through = sum(forward) + sum(backward) + 2 * (len(forward) - 1) * message
    return through + (microbatches - 1) * max(map(sum, zip(forward, backward, strict=True)))


def bubble_fraction(stages: int, microbatches: int) -> float:
    """Return (S - 1)/(J + S - 1), the share of time that each of S equal stages is idle (Huang et al., section 2.3)."""
    return (stages - 1) / (microbatches + stages - 1)


POSITIONS = ("max_position_embeddings", "n_positions")
IMAGINED_BLOCKS = 3


class Estimate:
    """Memory and time for the options; `ranges` are the blocks of each stage. Methods also take another work.

    Args:
        config: the model's configuration, if `options.model` is only a label.

    Raises:
        UserError: a model that is unknown or cannot be split; a length above its number of positions.
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
        )
        self.model = build(config, options.rank, options.weights_dtype)
        self.ranges = choose_ranges(self.model, options.devices)
        last = len(self.ranges) - 1
        self.kinds = [Kind(stop - start, stage == 0, stage == last) for stage, (start, stop) in enumerate(self.ranges)]
        self.imagined = lru_cache(None)(footprint)

    def footprint(self, work: Work, kind: Kind, name: str) -> Footprint:
        """Return the footprint of a stage with passes `name` of `Passes`, extrapolated beyond three blocks."""
        if kind.blocks <= IMAGINED_BLOCKS:
            return self.imagined(work, kind, name)
        before, last = (self.imagined(work, replace(kind, blocks=IMAGINED_BLOCKS - i), name) for i in (1, 0))
        more = kind.blocks - IMAGINED_BLOCKS
        return Footprint(**{key: value + more * (value - getattr(before, key)) for key, value in vars(last).items()})

    def microbatches(self, work: Work) -> int:
        """Return J: enough microbatches for a logical batch, and at least one for each stage."""
        return max(-(-self.options.batch // work.microbatch), len(self.kinds))

    # -- memory ---------------------------------------------------------------------------------------------------

    def memory(self, work: Work, name: str = "device") -> list[Memory]:
        """Return the peak memory of each stage in a step whose backward passes are `name` of `Passes`."""
        found = []
        for stage, kind in enumerate(self.kinds):
            plain, clipped = self.footprint(work, kind, "none"), self.footprint(work, kind, name)
            found.append(stage_memory(plain, clipped, len(self.kinds), stage, self.microbatches(work)))
        return found

    def fullest(self, work: Work) -> int:
        """Return the largest peak memory of a stage, in bytes, with per-device clipping."""
        return max(memory.peak for memory in self.memory(work))

    # -- time -----------------------------------------------------------------------------------------------------

    def seconds(self, work: Work, kind: Kind, name: str) -> tuple[float, float]:
        """Return the seconds of the forward and the backward pass of a microbatch, recomputation included.

        They are the operations divided by the achieved rate, and at least the time to read the weights once in each
        pass. The achieved rate is that of whole trainings, so it includes kernels that are limited by bandwidth
        (layer norms, softmax). Clipping therefore costs its operations here, but its small kernels cost nothing.
        """
        device, found = self.options.device, self.footprint(work, kind, name)
        rate = device.peak[work.dtype] * device.share
        reading = (found.frozen + found.trained) / device.bandwidth
        return (
            max(found.forward_operations / rate, reading),
            max(found.backward_operations / rate, reading * (1 + work.rematerialize)),
        )

    def times(self, work: Work, name: str = "device") -> Times:
        """Return the times of a step whose backward passes are `name` of `Passes`."""
        device, count = self.options.device, self.microbatches(work)
        forward, backward = zip(*(self.seconds(work, kind, name) for kind in self.kinds), strict=True)
        norms = tuple(self.seconds(work, kind, "norms")[1] for kind in self.kinds) if name != "none" else backward
        found = [self.footprint(work, kind, name) for kind in self.kinds]
        update = UPDATE_PASSES * max(of.trained for of in found) / device.bandwidth
        message = device.latency + max(of.sent for of in found) / device.link
        agree = device.latency * math.ceil(math.log2(len(self.kinds) + 1))  # an all-reduce of a few numbers

        def passes(backward: tuple[float, ...]) -> float:
            return duration(count, forward, backward, message) + agree

        per_device = passes(backward) + update
        return Times(count, forward, backward, per_device, passes(norms) + per_device)
