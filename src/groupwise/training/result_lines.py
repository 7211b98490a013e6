"""Says in two lines what a finished run spent and what it reached."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from typing import Any

from groupwise.privacy.plan import WIDTH
from groupwise.rows import METRICS


def result_lines(row: Mapping[str, Any]) -> list[str]:
    """The lines that a run ends with, from its result row (`RunRecord.finish`); a run that trained nothing spent
    nothing."""
    figures = [
        f"{key}\xa0{value:.2f}"
        for key, value in row.items()
        if key.startswith(METRICS) and isinstance(value, int | float) and "loss" not in key and "nll" not in key
    ]
    told = "  ".join([*figures, f"in\xa0{row['system.wall_seconds']:.0f}\xa0s"])
    reached = textwrap.fill(told, WIDTH, subsequent_indent="  ").replace("\xa0", " ")
    return [*_spent(row), *reached.splitlines()]


def _spent(row: Mapping[str, Any]) -> list[str]:
    if "plan.spent_epsilon" not in row:
        return []
    if not row["plan.noise_multiplier"]:
        return ["Spent: no noise was added; this model has no privacy guarantee"]
    stamp = " (as published, not a guarantee)" if row["seeds.noise_is_secret"] else " (NOT PRIVATE)"
    told = f"epsilon {row['plan.spent_epsilon']:.3f} at delta {row['plan.delta']:g} in {row['plan.steps']} steps"
    return [f"Spent: {told}{'' if row['plan.private'] else stamp}"]
