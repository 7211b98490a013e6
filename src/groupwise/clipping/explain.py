"""Why each layer's norms are computed the way they are: the cost model's choices, in words."""

from typing import Any

from groupwise.clipping.costs import Decision
from groupwise.clipping.engine import ClippingEngine
from groupwise.clipping.gate import Member

_HEAD = ("layer", "type", "input -> output", "norms by", "estimated, for norms and clipped sum")


def explain(engine: ClippingEngine) -> str:
    """A table of layers: the formula chosen in the last backward pass, and what the others would have cost.

    Layers with one way only (embeddings, normalisations, inputs without a second axis) say so.
    """
    rows = [_HEAD, *(_row(member) for group in engine.groups for member in group.members)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(_HEAD) - 1)]
    lines = [
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[-1]]) for row in rows
    ]
    shared = engine.products_reused
    return "\n".join([*lines, f"Inner products of inputs taken over from the layer before: {shared} times."])


def _row(member: Member) -> tuple[str, ...]:
    name, kind = member.name or "(model)", type(member.rule.module).__name__
    last = member.rule.choices.last
    if last is None:
        return (name, kind, "", "one way", "no choice to make")
    decision = member.rule.choices[last]
    return (name, kind, _arrow(last), decision.chosen, _why(decision))


def _arrow(key: tuple[Any, ...]) -> str:
    return " -> ".join("×".join(map(str, sizes)) for sizes in key[:2])


def _why(decision: Decision) -> str:
    costs = sorted(decision.seconds.items(), key=lambda item: item[0] != decision.chosen)
    text = ", ".join(
        f"{name} {1e3 * seconds:.2f} ms and {decision.work[name].bytes / 1e6:.1f} MB" for name, seconds in costs
    )
    return text + (" (forced)" if decision.forced else "")
