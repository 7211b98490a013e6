"""Modes of clipping (partition, norm method, direct), and an engine for a mode."""

from collections.abc import Sequence
from typing import Any

from torch import nn

from groupwise.clipping import ClippingEngine, attach, flat, per_block, per_layer

MODES: dict[str, tuple[Any, dict[str, Any]]] = {
    "flat": (flat, {}),
    "ghost": (flat, {"norms": "ghost"}),
    "layer": (per_layer, {}),
    "block": (per_block, {}),
    "gram": (per_layer, {"formula": "gram"}),
    "materialized": (per_layer, {"formula": "materialize"}),
    "direct": (per_layer, {"direct": True}),
    "direct ghost": (flat, {"norms": "ghost", "direct": True}),
}
"""Mode -> the partition, and further arguments of `attach`."""
FEW = ("flat", "ghost", "layer")
"""Flat clipping by book-keeping and by ghost clipping, and per-layer clipping."""
DIRECT = ("direct", "direct ghost")
"""The layers themselves return clipped gradients."""


def attached(model: nn.Module, mode: str, thresholds: Sequence[float] | float = 1.0, **options: Any) -> ClippingEngine:
    """Attach an engine to the model in this mode."""
    make_partition, own = MODES[mode]
    return attach(model, make_partition(model), thresholds, **own, **options)
