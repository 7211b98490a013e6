"""Finds the best cell of a search by its mean over seeds."""

import math
from collections.abc import Mapping
from typing import Any

from groupwise.errors import UserError
from groupwise.rows import Row

HEADLINES = ("valid/accuracy", "valid/perplexity")
"""Metrics that searches compare; each task has one. With `data.holdout` it is computed on a part of the training set,
otherwise on the paper's validation set."""


def search_metric(row: Mapping[str, Any]) -> float | None:
    """The value of the headline metric in a result row, or None."""
    return next((float(row[name]) for name in HEADLINES if name in row), None)


APART = ("task", "model", "model.trains", "clip", "privacy.epsilon")
"""Cells with different values of these keys are not compared."""


def candidates(rows: list[Row], metric: str) -> Any:
    """A data frame with one row per cell of the search, in the order of the rows.

    Columns: ``cell``; ``mean`` and ``std`` of `metric` over ``seeds``, NaN if a run diverged; ``rivals``, the settings
    of the keys in `APART`, which are equal for cells that are compared; ``whole``: whether the cell has the most seeds
    and no run diverged; ``best``: whether it is the best such cell among its rivals.

    Raises:
        UserError: no row has that metric.
    """
    import pandas as pd

    if not any(row.get(metric) for row in rows):
        raise UserError(f"no row of the search has {metric}, by which its cells are compared: collect the sweep again.")
    values = pd.DataFrame({"cell": [row["cell"] for row in rows], "value": [row.get(metric) or "nan" for row in rows]})
    values["value"] = values["value"].astype(float).where(lambda column: column.abs() < math.inf)
    groups = values.groupby("cell", sort=False)["value"]
    found = pd.DataFrame({"mean": groups.mean(skipna=False), "std": groups.std(skipna=False), "seeds": groups.size()})
    found = found.reset_index()
    words = found["cell"].str.split(" ")
    found["rivals"] = [" ".join(part for part in own if part.split("=")[0] in APART) for own in words]
    found["whole"] = (found["seeds"] == found["seeds"].max()) & found["mean"].notna()
    lower_is_better = metric.rpartition("/")[2] in ("loss", "nll", "perplexity")
    order = found[found["whole"]].sort_values("mean", ascending=lower_is_better, kind="stable")
    found["best"] = found.index.isin(order.drop_duplicates("rivals").index)
    return found
