"""What a search makes as good as it can: the figure of the validation split by which a task is judged."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

HEADLINES = ("valid/accuracy", "valid/perplexity")
"""A task has one of them; with `data.holdout` the split is a part of the training set, without it the paper's own."""


def objective(row: Mapping[str, Any]) -> float | None:
    """The headline of a result row; None where a run has none, as it only explained itself."""
    return next((float(row[name]) for name in HEADLINES if name in row), None)


def lower_is_better(metric: str) -> bool:
    """Of losses and perplexities."""
    return metric.rpartition("/")[2] in ("loss", "nll", "perplexity")
