"""The plan in lines of text."""

from __future__ import annotations

from groupwise.pipeline.plan.planner import Plan
from groupwise.pipeline.plan.variants import Variant

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
