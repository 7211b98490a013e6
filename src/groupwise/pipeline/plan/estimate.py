"""One model on one kind of device: memory and time of any number of stages and any microbatch."""

from __future__ import annotations

import math
import os
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch

from groupwise.clipping.cost_model import USUAL_RATES, machine_rates
from groupwise.errors import UserError
from groupwise.pipeline.anatomy import dissect
from groupwise.pipeline.plan.calibration import Timed
from groupwise.pipeline.plan.footprint import Footprint, footprint
from groupwise.pipeline.plan.memory import Memory, stage_memory
from groupwise.pipeline.plan.options import PlanOptions
from groupwise.pipeline.plan.shapes import build, configuration
from groupwise.pipeline.plan.speed import Rated, Speed
from groupwise.pipeline.plan.variants import Setting
from groupwise.pipeline.plan.work import Kind, Work
from groupwise.pipeline.split import Ranges, choose_ranges

POSITIONS = ("max_position_embeddings", "n_positions")
IMAGINED_BLOCKS = 3


class Estimate:
    """Answers by `options`, except where a method is given another work or number of stages.

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
        timed = options.device.measured
        self.work = Work(
            config,
            options.microbatch or 1,
            options.length,
            options.places or options.length,
            rank=options.rank,
            targets=options.adapted,
            dtype=options.weights_dtype,
            attention=options.attention,
            rematerialize=options.rematerialize,
            rates=machine_rates("cpu", 0, torch.get_num_threads()) if timed else USUAL_RATES["cuda"],
        )
        self.model = build(
            config,
            rank=options.rank,
            targets=options.adapted,
            dtype=options.weights_dtype,
            attention=options.attention,
        )
        self.blocks = len(dissect(self.model).blocks)
        self.imagined = lru_cache(None)(footprint)
        self._speeds: dict[Work, Speed] = {}

    def footprint(self, work: Work, kind: Kind, name: str) -> Footprint:
        """Of a stage with passes `name` of `work.PASSES`; beyond three blocks each is as the third."""
        if kind.blocks <= IMAGINED_BLOCKS:
            return self.imagined(work, kind, name)
        before, last = (self.imagined(work, replace(kind, blocks=IMAGINED_BLOCKS - i), name) for i in (1, 0))
        more = kind.blocks - IMAGINED_BLOCKS
        return Footprint(**{key: value + more * (value - getattr(before, key)) for key, value in vars(last).items()})

    def ranges(self, work: Work, stages: int | None = None) -> Ranges:
        """Blocks of each stage, by `options.balance`."""
        costs = None
        if self.options.balance == "time":
            speed = self.speed(work)
            middle, first, last = (
                sum(vars(speed.passes(kind, "device")).values())
                for kind in (Kind(1, False, False), Kind(1, True, False), Kind(1, False, True))
            )
            costs = [max(first - middle, 0.0), *[middle] * self.blocks, max(last - middle, 0.0)]
        return choose_ranges(self.model, stages or self.options.devices, self.options.balance, costs=costs)

    def microbatches(self, work: Work, stages: int) -> int:
        """J: enough for a logical batch, and for 1F1B at least one for each stage."""
        count = -(-self.options.batch // work.microbatch)
        return max(count, stages) if self.options.schedule == "1f1b" else count

    # -- memory ---------------------------------------------------------------------------------------------------

    def memory(self, work: Work, ranges: Ranges, name: str = "device") -> list[Memory]:
        """What each stage holds at most; `name` is a pass of `work.PASSES`, or flat."""
        return [
            self._memory(work, ranges, stage, name, self.footprint(work, kind, "none"))
            for stage, kind in enumerate(kinds(ranges))
        ]

    def fullest(self, work: Work, stages: int | None = None) -> int:
        """Bytes of the stage that holds most, with per-device clipping."""
        ranges = self.ranges(work, stages)
        return max(self._memory(work, ranges, stage, "device").peak for stage in range(len(ranges)))

    def fits(self, work: Work, stages: int | None = None) -> bool:
        """Whether every stage fits its device."""
        return self.fullest(work, stages) <= self.options.room

    def _memory(self, work: Work, ranges: Ranges, stage: int, name: str, plain: Footprint | None = None) -> Memory:
        """Of one stage; what clipping adds is told apart where `plain` is given."""
        kind, count = kinds(ranges)[stage], self.microbatches(work, len(ranges))
        together = not self.options.device.measured

        def of(name: str) -> Memory:
            found = self.footprint(work, kind, name)
            return stage_memory(
                plain or found, found, self.options.schedule, len(ranges), stage, count, all_at_once=together
            )

        return max(map(of, ("norms", "sums") if name == "flat" else (name,)), key=lambda memory: memory.peak)

    # -- time -----------------------------------------------------------------------------------------------------

    def speed(self, work: Work) -> Speed:
        """What tells how long things take: looked up, or timed here."""
        if work not in self._speeds:
            device, dtype = self.options.device, work.dtype if work.half else "float32"
            self._speeds[work] = (
                Timed(work)
                if device.measured
                else Rated(
                    device,
                    dtype,
                    lambda kind, name: self.footprint(work, kind, name),
                    rematerialize=work.rematerialize,
                )
            )
        return self._speeds[work]

    def setting(self, work: Work, ranges: Ranges, name: str = "device") -> Setting:
        """One step, its backward passes `name` of `work.PASSES`."""
        device, speed, stages = self.options.device, self.speed(work), kinds(ranges)
        passes = [speed.passes(kind, name) for kind in stages]
        norms = passes if name == "none" else [speed.passes(kind, "norms") for kind in stages]
        found = [self.footprint(work, kind, name) for kind in stages]
        cores = self.options.cores or os.cpu_count() or 1
        return Setting(
            schedule=self.options.schedule,
            microbatches=self.microbatches(work, len(ranges)),
            forward=tuple(seconds.forward for seconds in passes),
            backward=tuple(seconds.backward for seconds in passes),
            norms=tuple(seconds.backward for seconds in norms),
            update=max(speed.update(kind, noisy=name != "none") for kind in set(stages)),
            message=device.latency + max(one.sent for one in found) / device.link,
            agree=device.latency * math.ceil(math.log2(len(ranges) + 1)),
            gradients=tuple(work.microbatch * one.trained for one in found),
            edges=tuple(one.received + one.sent for one in found),
            host=device.host,
            bandwidth=device.bandwidth,
            rematerialize=work.rematerialize,
            cores=cores if device.measured else math.inf,
        )


def kinds(ranges: Ranges) -> list[Kind]:
    """What each stage is."""
    last = len(ranges) - 1
    return [Kind(stop - start, stage == 0, stage == last) for stage, (start, stop) in enumerate(ranges)]
