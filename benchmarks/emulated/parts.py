"""Says for which part of a private step a kernel was started, and for which kind of layer, from Python's stack."""

from collections import Counter
from types import FrameType

from groupwise.clipping.groups import ClippedLayer
from groupwise.clipping.rules.base import LayerRule

PARTS = {
    "LayerFunction.forward": "forward",
    "DirectFunction.forward": "forward",
    "arrange": "input gradient",
    "input_gradient": "input gradient",
    "begin_backward": "input gradient",
    "per_example_gradients": "gradients",
    "gradient_chunks": "gradients",
    "windows": "gradients",
    "squared_norms": "norms",
    "squared_row_norms": "norms",
    "squares_together": "norms",
    "weighted_sum": "sums",
    "weigh_rows": "sums",
    "add_weighed_rows": "sums",
    "joined_sums": "sums",
    "GroupPass.add": "sums",
    "ClippedGradients.add": "sums",
    "clip_factors_of": "factors",
    "ThresholdsAndCounts._count": "counts",
    "ThresholdsAndCounts._on_host": "counts",
    "ThresholdsAndCounts._reset_counts": "counts",
    "set_thresholds": "thresholds",
    "add_gaussians_": "noise",
    "release_gradients": "noise",
    "Optimizer.profile_hook_step.<locals>.wrapper": "update",
}
"""The part that a function belongs to, by its qualified name or the end of it; the innermost on the stack counts."""
MODEL = "benchmarks/emulated/step.py"
"""Whoever runs the model's forward pass; a backward pass of torch's own operations has no frame of Python's above."""


def asked_by(frame: FrameType | None) -> tuple[str, str]:
    """(part, kind of layer) of what the frame's code does; "" where no layer asked."""
    part = kind = ""
    forward = False
    while frame is not None:
        name = frame.f_code.co_qualname
        part = part or PARTS.get(name, "") or PARTS.get(name.rpartition(".")[2], "")
        kind = kind or _kind(frame)
        forward = forward or (frame.f_code.co_filename.endswith(MODEL) and name.endswith("loss"))
        frame = frame.f_back
    return part or ("model, forward" if forward else "model, backward"), kind


def _kind(frame: FrameType) -> str:
    for name in ("self", "member"):
        found = frame.f_locals.get(name)
        rule = found.rule if isinstance(found, ClippedLayer) else found
        if isinstance(rule, LayerRule):
            return type(rule).__name__.removesuffix("Rule")
    return ""


def table(kernels: Counter[tuple[str, str]], moved: Counter[tuple[str, str]]) -> list[str]:
    """Lines of kernels and GB, a part after the other, the kinds of layers inside, the most bytes first."""
    parts = Counter[str]()
    for (part, _), count in moved.items():
        parts[part] += count
    lines = []
    for part, count in parts.most_common():
        own = [key for key in moved if key[0] == part]
        lines.append(f"    {part:24} {sum(kernels[key] for key in own):6} kernels {count / 1e9:8.2f} GB")
        if any(kind for _, kind in own):
            for key in sorted(own, key=lambda key: -moved[key]):
                lines.append(f"      {key[1] or '-':22} {kernels[key]:6} kernels {moved[key] / 1e9:8.2f} GB")
    return lines
