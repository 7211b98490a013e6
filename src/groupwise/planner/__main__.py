"""Plans a pipeline from the command line:  python -m groupwise.planner model=gpt3_175b devices=16 memory=32GB

Goes from options to a plan: which microbatch fits and is fastest, what each device holds, how long a step takes.
`--help` lists the options. Exit codes: 0, 2 for a mistake or a model that does not fit.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace

from groupwise.errors import INTERRUPTED, UserError, command
from groupwise.pipeline.model_parts import find_parts
from groupwise.pipeline.split import Ranges, choose_ranges
from groupwise.planner.estimate import Estimate, Memory, kinds
from groupwise.planner.footprint import Work
from groupwise.planner.options import HELP, PlanOptions, parse
from groupwise.planner.timeline import Variant, bubble_fraction, flat_variants, per_device, two_passes


@dataclass(frozen=True)
class Plan:
    """The printed plan.

    Args:
        options: what was asked for, with the microbatch that was chosen.
        parameters, trained: numbers in the whole model, adapters included, and those of them that train.
        most: the largest microbatch that fits.
        ranges: blocks of each stage.
        memory: of each stage.
        microbatches: J.
        bubble: the fraction that each device waits if all stages take equally long.
        traffic: bytes between stages in a step, both directions, over all links.
        variants: per-device clipping, then the variants of flat clipping.
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
        UserError: the model does not fit; names the number of devices with which it would.
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
    """The most examples that fit, if one does: a linear extrapolation, then a search."""

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
    sizes = [sum(p.nbytes for p in block.parameters()) for block in find_parts(estimate.model).blocks]
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


GB = 1e9
HOUR = 3600.0
PARTS = ("weights", "state", "activations", "working", "clipping", "buffers", "peak")


def report(plan: Plan) -> str:
    """All of it, the advice last."""
    return "\n".join([*_head(plan), "", *_stages(plan), "", *_pipeline(plan), "", *_variants(plan), "", advice(plan)])


def advice(plan: Plan) -> str:
    """One plain sentence or two."""
    options, best = plan.options, plan.variants[0]
    flat = min((v for v in plan.variants[1:] if v.device <= _free(plan)), key=lambda variant: variant.seconds)
    free, epochs = _free(plan) / GB, best.seconds * plan.steps * options.epochs
    text = (
        f"Do: devices={options.devices}, microbatch={options.microbatch}, {options.schedule}, per-device clipping; "
        f"{free:.1f} GB stay free on the fullest device and {options.epochs:g} epochs take {_time(epochs)}. "
        f"The fastest flat clipping that fits ({flat.name.removeprefix('flat, ')}, {flat.sync}) takes "
        f"{flat.seconds / best.seconds:.2f} times as long and {flat.device / GB:.3g} GB more."
    )
    if plan.lighter is not None and plan.lighter < 0.95 * best.seconds:
        text += f" rematerialize=false fits too and takes {plan.lighter / best.seconds:.2f} times as long."
    return text


def _free(plan: Plan) -> float:
    return plan.options.room - max(memory.peak for memory in plan.memory)


def _head(plan: Plan) -> list[str]:
    options = plan.options
    device = options.device
    trains = f"LoRA of rank {options.rank}, {_number(plan.trained)}" if options.rank else "everything"
    dtype = options.weights_dtype if options.rank else "float32"
    if device.measured:
        speed = "blocks timed here"
    else:
        speed = f"{device.peak[dtype] / 1e12:g} TFLOP/s, {device.share:.0%} of them achieved"
    return [
        f"{options.model}: {_number(plan.parameters)} parameters in {dtype}, trains {trains}",
        f"{options.devices} x {device.name}: {options.room / GB:.1f} GB for tensors, {speed}",
        f"batch {options.batch} = {plan.microbatches} microbatches of {options.microbatch} x {options.length} tokens "
        f"({_up_to(plan)}), "
        f"{options.schedule}, {'with' if options.rematerialize else 'without'} rematerialisation",
    ]


def _up_to(plan: Plan) -> str:
    return "the whole batch would fit" if plan.most == plan.options.batch else f"up to {plan.most} would fit"


def _stages(plan: Plan) -> list[str]:
    lines = [f"{'stage':>5s} {'blocks':>9s}" + "".join(f"{part:>12s}" for part in PARTS) + f"{'free':>12s}   (GB)"]
    for stage, ((start, stop), memory) in enumerate(zip(plan.ranges, plan.memory, strict=True)):
        numbers = [*(getattr(memory, part) for part in PARTS), plan.options.room - memory.peak]
        cells = "".join(f"{number / GB:12.3f}" for number in numbers)
        lines.append(f"{stage:5d} {f'{start}-{stop - 1}':>9s}{cells}")
    return lines


def _pipeline(plan: Plan) -> list[str]:
    best = plan.variants[0]
    return [
        f"bubble {plan.bubble:.1%} ((S-1)/(J+S-1)); {plan.traffic / GB:.3g} GB between stages a step; "
        f"{plan.steps:.4g} steps an epoch",
        f"without clipping and noise: {_time(plan.plain)} a step, {_time(plan.plain * plan.steps)} an epoch "
        f"(per-device clipping: {best.seconds / plan.plain:.3f} times as long)",
    ]


def _variants(plan: Plan) -> list[str]:
    head = f"{'clipping':22s}{'synchronised':18s}{'a step':>10s}{'an epoch':>10s}{'times':>8s}"
    lines = [head + f"{'device':>10s}{'host':>10s}{'traffic':>10s}   (GB more, GB a step)"]
    return lines + [_line(plan, variant) for variant in plan.variants]


def _line(plan: Plan, variant: Variant) -> str:
    best = plan.variants[0].seconds
    sizes = "".join(f"{size / GB:10.3g}" for size in (variant.device, variant.host, variant.traffic))
    times = f"{_time(variant.seconds):>10s}{_time(variant.seconds * plan.steps):>10s}{variant.seconds / best:8.2f}"
    fits = "" if variant.device <= _free(plan) else "   does not fit"
    return f"{variant.name:22s}{variant.sync:18s}{times}{sizes}{fits}"


def _number(count: int) -> str:
    return f"{count / 1e9:.4g} billion" if count >= 1e9 else f"{count / 1e6:.4g} million"


def _time(seconds: float) -> str:
    for unit, size in (("h", HOUR), ("min", 60.0)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} s"


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Print a plan; returns the exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if {"-h", "--help"} & set(given):
        print(HELP)
        return 0
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    try:
        options = parse(given)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            print(report(make_plan(Estimate(options))))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    return 0


if __name__ == "__main__":
    sys.exit(main())
