"""Estimates the memory of a private pipeline on each device, and its time, without allocating the model:

python -m groupwise.planner model=gpt3_175b devices=16 memory=32 microbatch=1
python -m groupwise.planner model=opt_66b devices=8 accelerator=a100_80gb length=512

Exit codes: 0, 2 for a mistake or a model that does not fit.
"""

import os
import sys
import warnings
from bisect import bisect_right
from dataclasses import asdict, dataclass, replace

import numpy as np
import pandas as pd

from groupwise.errors import UserError
from groupwise.options import command
from groupwise.pipeline.split import Ranges
from groupwise.planner.estimate import Estimate, Memory, Times, bubble_fraction
from groupwise.planner.footprint import Work
from groupwise.planner.options import PlanOptions


@dataclass(frozen=True)
class Plan:
    """The printed plan.

    Args:
        options: the given options, with the chosen microbatch.
        parameters, trained: numbers of all parameters, adapters included, and of the trained ones.
        most: the largest microbatch that fits.
        ranges: the blocks of each stage.
        memory: for each stage, in bytes.
        times: for a step, in seconds.
        plain: seconds of a step without clipping and noise.
    """

    options: PlanOptions
    parameters: int
    trained: int
    most: int
    ranges: Ranges
    memory: list[Memory]
    times: Times
    plain: float

    @property
    def steps(self) -> float:
        """The number of logical batches in an epoch."""
        return self.options.examples / self.options.batch


def make_plan(estimate: Estimate) -> Plan:
    """Return the whole plan; raises `UserError` if the model does not fit."""
    options = estimate.options
    if estimate.fullest(estimate.work) > options.room:
        raise UserError(_why_not(estimate))
    most = largest_microbatch(estimate)
    work = _chosen(estimate, most)
    return Plan(
        options=replace(options, microbatch=work.microbatch),
        parameters=sum(p.numel() for p in estimate.model.parameters()),
        trained=sum(p.numel() for p in estimate.model.parameters() if p.requires_grad),
        most=most,
        ranges=estimate.ranges,
        memory=estimate.memory(work),
        times=estimate.times(work),
        plain=estimate.times(work, "none").per_device,
    )


def largest_microbatch(estimate: Estimate) -> int:
    """Return the largest number of examples that fit."""

    def need(microbatch: int) -> int:
        return estimate.fullest(replace(estimate.work, microbatch=microbatch))

    return bisect_right(range(1, estimate.options.batch + 1), estimate.options.room, key=need)


def _chosen(estimate: Estimate, most: int) -> Work:
    """Return the work for the given microbatch, or for the fastest of 1, 2, 4, … and the largest that fits."""
    if estimate.options.microbatch:
        return estimate.work
    sizes = sorted({most, *(1 << i for i in range(most.bit_length()))})
    works = [replace(estimate.work, microbatch=size) for size in sizes]
    return min(works, key=lambda work: estimate.times(work).per_device)


def _why_not(estimate: Estimate) -> str:
    options, work = estimate.options, estimate.work
    memory = estimate.memory(work)
    stage = max(range(len(memory)), key=lambda i: memory[i].peak)
    why = (
        f"{options.model} does not fit on {options.devices} devices with microbatch {work.microbatch}: stage {stage} "
        f"needs {memory[stage].peak / 1e9:.1f} GB, {memory[stage].weights / 1e9:.1f} of them for frozen weights, and "
        f"{options.room / 1e9:.1f} GB are available"
    )
    return f"{why}; give more devices, devices with more memory, or a shorter length."


GB = 1e9


def report(plan: Plan) -> str:
    """Return the report: the options, the table of stages, and the times."""
    options, times = plan.options, plan.times
    device, best = options.device, times.per_device
    dtype = options.weights_dtype
    trains = f"LoRA of rank {options.rank}, {_number(plan.trained)}" if options.rank else "everything"
    speed = f"{device.peak[dtype] / 1e12:g} TFLOP/s, of which {device.share:.0%} are achieved"
    stages = pd.DataFrame([{**asdict(memory), "peak": memory.peak} for memory in plan.memory])
    stages["free"] = options.room - stages["peak"]
    table = stages / GB
    table.insert(0, "blocks", [f"{start}-{stop - 1}" for start, stop in plan.ranges])
    table["forward ms"], table["backward ms"] = (1e3 * np.array(each) for each in (times.forward, times.backward))
    free = stages["free"].min() / GB
    return f"""\
{options.model}: {_number(plan.parameters)} parameters in {dtype}, trains {trains}
{options.devices} x {device.name}: {options.room / GB:.1f} GB for tensors, {speed}
batch {options.batch} = {times.microbatches} microbatches of {options.microbatch} x {options.length} tokens \
(up to {plan.most} would fit), 1F1B, {"with" if options.rematerialize else "without"} rematerialisation

GB of each stage, and milliseconds for a microbatch (with the head at every position, an upper bound):
{table.rename_axis("stage").reset_index().to_string(index=False, float_format="%.3f")}

bubble {bubble_fraction(options.devices, times.microbatches):.1%} ((S-1)/(J+S-1)); \
{plan.steps:.4g} steps an epoch
without clipping and noise   {_times(plan, plan.plain)}
per-device clipping          {_times(plan, best)}
flat clipping in two passes  {_times(plan, times.flat)}

Recommended: devices={options.devices}, microbatch={options.microbatch}, per-device clipping. \
{free:.1f} GB stay free on the fullest device, and {options.epochs:g} epochs take \
{_time(best * plan.steps * options.epochs)}."""


def _times(plan: Plan, seconds: float) -> str:
    share = seconds / plan.times.per_device
    return f"{_time(seconds):>9} a step {_time(seconds * plan.steps):>9} an epoch {share:6.2f} times as long"


def _number(count: int) -> str:
    return f"{count / 1e9:.4g} billion" if count >= 1e9 else f"{count / 1e6:.4g} million"


def _time(seconds: float) -> str:
    for unit, size in (("h", 3600.0), ("min", 60.0)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} s"


def run(options: PlanOptions) -> None:
    """Print the plan."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    with warnings.catch_warnings(action="ignore"):
        print(report(make_plan(Estimate(options))))


main = command(PlanOptions, run)

if __name__ == "__main__":
    sys.exit(main())
