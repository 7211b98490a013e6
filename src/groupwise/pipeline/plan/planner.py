"""From options to a plan: which microbatch fits and is fastest, what each device holds, how long a step takes."""

from __future__ import annotations

from dataclasses import dataclass, replace

from groupwise.errors import UserError
from groupwise.pipeline.anatomy import dissect
from groupwise.pipeline.plan.estimate import Estimate, kinds
from groupwise.pipeline.plan.memory import Memory
from groupwise.pipeline.plan.options import PlanOptions
from groupwise.pipeline.plan.timeline import bubble_fraction
from groupwise.pipeline.plan.variants import Variant, flat_variants, per_device, two_passes
from groupwise.pipeline.plan.work import Work
from groupwise.pipeline.split import Ranges, choose_ranges


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


def make_plan(estimate: Estimate) -> Plan:
    """The whole plan.

    Raises:
        UserError: one sentence why the model cannot fit, and with how many devices it would.
    """
    options = estimate.options
    if options.devices > estimate.blocks:
        blocks = f"the {estimate.blocks} blocks of {options.model}"
        raise UserError(f"devices={options.devices} is more than {blocks}: give no more.")
    if not estimate.fits(estimate.work):
        raise UserError(_why_not(estimate))
    most = largest_microbatch(estimate)
    work = _chosen(estimate, most)
    ranges = estimate.ranges(work)
    setting = estimate.setting(work, ranges)
    count = setting.microbatches
    return Plan(
        options=replace(options, microbatch=work.microbatch),
        parameters=sum(p.numel() for p in estimate.model.parameters()),
        trained=sum(p.numel() for p in estimate.model.parameters() if p.requires_grad),
        most=most,
        ranges=ranges,
        memory=estimate.memory(work, ranges),
        microbatches=count,
        bubble=bubble_fraction(options.devices, count),
        traffic=2 * count * sum(estimate.footprint(work, kind, "device").sent for kind in kinds(ranges)),
        variants=[per_device(setting), *flat_variants(setting), two_passes(setting)],
        plain=per_device(estimate.setting(work, ranges, "none")).seconds,
        lighter=_lighter(estimate, work),
    )


def largest_microbatch(estimate: Estimate) -> int:
    """The most examples that fit, if one does: a guess from a straight line, then looking."""

    def of(microbatch: int) -> Work:
        return replace(estimate.work, microbatch=microbatch)

    batch = estimate.options.batch
    one, two = (estimate.fullest(of(b)) for b in (1, min(2, batch)))
    more = batch if two <= one else int((estimate.options.room - one) / (two - one))
    guess = min(1 + more, batch)
    while guess > 1 and not estimate.fits(of(guess)):
        guess = max(1, min(guess - 1, int(guess * 0.95)))
    return guess


def least_devices(estimate: Estimate) -> int | None:
    """The least number of stages, beyond those asked for, with which the work fits; None if none does."""
    sizes = [sum(p.nbytes for p in block.parameters()) for block in dissect(estimate.model).blocks]
    for stages in range(estimate.options.devices + 1, estimate.blocks + 1):
        weights = max(sum(sizes[start:stop]) for start, stop in choose_ranges(estimate.model, stages))
        if weights <= estimate.options.room and estimate.fits(estimate.work, stages):
            return stages
    return None


def _chosen(estimate: Estimate, most: int) -> Work:
    """With the microbatch that was asked for; else the fastest among 1, 2, 4, … and the largest that fits."""
    if estimate.options.microbatch:
        return estimate.work
    sizes = sorted({most, *(1 << i for i in range(most.bit_length()))})
    works = [replace(estimate.work, microbatch=size) for size in sizes]
    return min(works, key=lambda work: per_device(estimate.setting(work, estimate.ranges(work))).seconds)


def _why_not(estimate: Estimate) -> str:
    options, work = estimate.options, estimate.work
    memory = estimate.memory(work, estimate.ranges(work))
    stage = max(range(len(memory)), key=lambda i: memory[i].peak)
    why = (
        f"{options.model} does not fit on {options.devices} devices with microbatch {work.microbatch}: stage {stage} "
        f"needs {memory[stage].peak / 1e9:.1f} GB, {memory[stage].weights / 1e9:.1f} of them frozen weights, and "
        f"{options.room / 1e9:.1f} are there"
    )
    least = least_devices(estimate)
    if least is None:
        return f"{why}; no number of devices would do, so give a shorter length or devices with more memory."
    return f"{why}; give at least {least} devices."


def _lighter(estimate: Estimate, work: Work) -> float | None:
    kept = replace(work, rematerialize=False)
    if not work.rematerialize or not estimate.fits(kept):
        return None
    return per_device(estimate.setting(kept, estimate.ranges(kept))).seconds
