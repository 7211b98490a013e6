"""From options to a plan: stages, what each holds, which microbatch fits, and how long a step takes."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import torch

from groupwise.clipping.costs import USUAL_RATES, machine_rates
from groupwise.errors import UserError
from groupwise.pipeline.anatomy import dissect
from groupwise.pipeline.plan.calibration import Timed
from groupwise.pipeline.plan.footprint import Footprint, footprint
from groupwise.pipeline.plan.memory import Memory, stage_memory
from groupwise.pipeline.plan.options import PlanOptions
from groupwise.pipeline.plan.shapes import build, configuration
from groupwise.pipeline.plan.speed import Rated, Speed
from groupwise.pipeline.plan.timeline import bubble_fraction
from groupwise.pipeline.plan.variants import Setting, Variant, flat_variants, per_device, two_passes
from groupwise.pipeline.plan.work import Kind, Work
from groupwise.pipeline.split import Ranges, choose_ranges

IMAGINED_BLOCKS = 3
POSITIONS = ("max_position_embeddings", "n_positions")


@dataclass(frozen=True)
class Plan:
    """What is printed.

    Args:
        options: what was asked for, with the microbatch that was chosen.
        parameters, trained: numbers in the whole model, adapters included, and those of them that train.
        most: the largest microbatch that fits.
        ranges: blocks of each stage.
        memory: of each stage.
        microbatches: J.
        bubble: the fraction that each device waits if all stages take equally long.
        traffic: bytes between stages in a step, both directions, over all links.
        variants: per-device clipping, then the ways to clip flat.
        plain: seconds of a step without clipping and noise.
        lighter: seconds of a step of per-device clipping without rematerialisation, where that would fit too.
    """

    options: PlanOptions
    parameters: int
    trained: int
    most: int
    ranges: Ranges
    memory: list[Memory]
    microbatches: int
    bubble: float
    traffic: int
    variants: list[Variant]
    plain: float
    lighter: float | None

    @property
    def steps(self) -> float:
        """Logical batches in an epoch."""
        return self.options.examples / self.options.batch


class Planner:
    """Answers for one model on one kind of device, with any number of stages and any microbatch.

    Args:
        options: checked ones.
        config: of the model, where `options.model` is only its name.

    Raises:
        UserError: a model that is not known or cannot be cut; more tokens than it has positions.
    """

    def __init__(self, options: PlanOptions, config: Any = None) -> None:
        self.options = options
        self.config = configuration(options.model) if config is None else config
        positions = next((n for key in POSITIONS if (n := getattr(self.config, key, None)) is not None), math.inf)
        if options.length > positions:
            raise UserError(f"length={options.length} is more than the {positions} positions of {options.model}.")
        self.model = build(
            self.config,
            rank=options.rank,
            targets=options.adapted,
            dtype=options.weights_dtype,
            attention=options.attention,
        )
        self.blocks = len(dissect(self.model).blocks)
        self.work = Work(
            self.config,
            options.microbatch or 1,
            options.length,
            options.places or options.length,
            rank=options.rank,
            targets=options.adapted,
            dtype=options.weights_dtype,
            attention=options.attention,
            rematerialize=options.rematerialize,
            rates=machine_rates("cpu", 0, torch.get_num_threads()) if options.device.measured else USUAL_RATES["cuda"],
        )
        self._imagined = lru_cache(None)(footprint)

    def plan(self) -> Plan:
        """The whole plan.

        Raises:
            UserError: one sentence why the model cannot fit, and with how many devices it would.
        """
        options = self.options
        if options.devices > self.blocks:
            raise UserError(
                f"devices={options.devices} is more than the {self.blocks} blocks of {options.model}: give no more."
            )
        if not self.fits(self.work):
            raise UserError(self._why_not())
        most = self.most()
        work = self._chosen(most)
        ranges = self.ranges(work)
        setting = self.setting(work, ranges)
        count = setting.microbatches
        return Plan(
            options=replace(options, microbatch=work.microbatch),
            parameters=sum(p.numel() for p in self.model.parameters()),
            trained=sum(p.numel() for p in self.model.parameters() if p.requires_grad),
            most=most,
            ranges=ranges,
            memory=self.memory(work, ranges),
            microbatches=count,
            bubble=bubble_fraction(options.devices, count),
            traffic=2 * count * sum(self.footprint(work, kind, "device").sent for kind in kinds(ranges)),
            variants=[per_device(setting), *flat_variants(setting), two_passes(setting)],
            plain=per_device(self.setting(work, ranges, "none")).seconds,
            lighter=self._lighter(work),
        )

    def footprint(self, work: Work, kind: Kind, name: str) -> Footprint:
        """Of a stage; beyond three blocks each is as the third."""
        if kind.blocks <= IMAGINED_BLOCKS:
            return self._imagined(work, kind, name)
        before, last = (self._imagined(work, replace(kind, blocks=IMAGINED_BLOCKS - i), name) for i in (1, 0))
        return Footprint(
            **{
                key: value + (kind.blocks - IMAGINED_BLOCKS) * (value - getattr(before, key))
                for key, value in vars(last).items()
            }
        )

    # -- memory ---------------------------------------------------------------------------------------------------

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

    def memory(self, work: Work, ranges: Ranges, name: str = "device") -> list[Memory]:
        """What each stage holds at most; `name` is a pass of `work.PASSES`, or flat."""
        return [
            self._stage_memory(work, ranges, stage, name, self.footprint(work, kind, "none"))
            for stage, kind in enumerate(kinds(ranges))
        ]

    def _stage_memory(
        self, work: Work, ranges: Ranges, stage: int, name: str, plain: Footprint | None = None
    ) -> Memory:
        """What one stage holds at most; what clipping adds is told apart where `plain` is given."""
        kind, count = kinds(ranges)[stage], self.microbatches(work, len(ranges))
        found = [self.footprint(work, kind, one) for one in (("norms", "sums") if name == "flat" else (name,))]
        by_pass = [
            stage_memory(
                plain or clipped,
                clipped,
                self.options.schedule,
                len(ranges),
                stage,
                count,
                all_at_once=not self.options.device.measured,
            )
            for clipped in found
        ]
        return max(by_pass, key=lambda memory: memory.peak)

    def microbatches(self, work: Work, stages: int) -> int:
        """J: enough for a logical batch, and for 1F1B at least one for each stage."""
        count = -(-self.options.batch // work.microbatch)
        return max(count, stages) if self.options.schedule == "1f1b" else count

    def fits(self, work: Work, stages: int | None = None) -> bool:
        """Whether every stage fits its device."""
        return self._fullest(work, stages) <= self.options.room

    def _fullest(self, work: Work, stages: int | None = None) -> int:
        ranges = self.ranges(work, stages)
        return max(self._stage_memory(work, ranges, stage, "device").peak for stage in range(len(ranges)))

    def most(self) -> int:
        """The largest microbatch that fits, if one does: a guess from a straight line, then looking."""
        batch = self.options.batch
        one, two = (self._fullest(self._of(b)) for b in (1, min(2, batch)))
        more = batch if two <= one else int((self.options.room - one) / (two - one))
        guess = min(1 + more, batch)
        while guess > 1 and not self.fits(self._of(guess)):
            guess = max(1, min(guess - 1, int(guess * 0.95)))
        return guess

    def _of(self, microbatch: int) -> Work:
        return replace(self.work, microbatch=microbatch)

    def _chosen(self, most: int) -> Work:
        """With the microbatch that was asked for; else the fastest among 1, 2, 4, … and the largest that fits."""
        if self.options.microbatch:
            return self.work
        sizes = sorted({most, *(1 << i for i in range(most.bit_length()))})
        return min(map(self._of, sizes), key=lambda work: per_device(self.setting(work, self.ranges(work))).seconds)

    def _why_not(self) -> str:
        options = self.options
        memory = self.memory(self.work, self.ranges(self.work))
        stage = max(range(len(memory)), key=lambda i: memory[i].peak)
        need, room = memory[stage].peak / 1e9, options.room / 1e9
        why = (
            f"{options.model} does not fit on {options.devices} devices with microbatch {self.work.microbatch}: "
            f"stage {stage} needs {need:.1f} GB, {memory[stage].weights / 1e9:.1f} of them frozen weights, and "
            f"{room:.1f} are there"
        )
        least = self.least_devices()
        if least is None:
            return f"{why}; no number of devices would do, so give a shorter length or devices with more memory."
        return f"{why}; give at least {least} devices."

    def least_devices(self) -> int | None:
        """The least number of stages with which the work fits; None if none does."""
        for stages in range(self.options.devices + 1, self.blocks + 1):
            ranges = choose_ranges(self.model, stages)
            if self._least(ranges) <= self.options.room and self.fits(self.work, stages):
                return stages
        return None

    def _least(self, ranges: Ranges) -> float:
        """Bytes below which no stage gets: its blocks' share of the weights."""
        parts = dissect(self.model).blocks
        sizes = [sum(p.nbytes for p in block.parameters()) for block in parts]
        return max(sum(sizes[start:stop]) for start, stop in ranges)

    # -- time -----------------------------------------------------------------------------------------------------

    @cached_property
    def _speeds(self) -> dict[Work, Speed]:
        return {}

    def speed(self, work: Work) -> Speed:
        """What tells how long things take: looked up, or timed here."""
        if work not in self._speeds:
            device = self.options.device
            self._speeds[work] = (
                Timed(work)
                if device.measured
                else Rated(
                    device,
                    work.dtype if work.half else "float32",
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
            cores=self.options.cores or os.cpu_count() or 1 if device.measured else math.inf,
        )

    def _lighter(self, work: Work) -> float | None:
        kept = replace(work, rematerialize=False)
        if not work.rematerialize or not self.fits(kept):
            return None
        return per_device(self.setting(kept, self.ranges(kept))).seconds


def kinds(ranges: Ranges) -> list[Kind]:
    """What each stage is."""
    return list(_kinds(ranges))


def _kinds(ranges: Ranges) -> Iterator[Kind]:
    for stage, (start, stop) in enumerate(ranges):
        yield Kind(stop - start, stage == 0, stage == len(ranges) - 1)
