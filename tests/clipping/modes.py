"""The ways to clip a model, and an engine that clips in one of them."""

from __future__ import annotations

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
"""Name -> the partition, and further arguments of `attach`."""
FEW = ("flat", "ghost", "layer")
"""One norm for each example, kept or found first, and one for each layer."""
DIRECT = ("direct", "direct ghost")
"""Layers that return clipped gradients themselves."""


def attached(model: nn.Module, mode: str, thresholds: Sequence[float] | float = 1.0, **options: Any) -> ClippingEngine:
    """An engine that clips the model in this mode."""
    make_partition, own = MODES[mode]
    return attach(model, make_partition(model), thresholds, **own, **options)
