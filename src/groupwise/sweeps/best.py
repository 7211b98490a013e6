"""Finds the best cell of a search by its mean over seeds:  python -m groupwise.sweeps.best search_sst2 scale=mini"""

import argparse
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from groupwise.errors import UserError, command, did_you_mean
from groupwise.rows import Row, read_table, table_path
from groupwise.sweeps.cells import PAPER, scale_of

HEADLINES = ("valid/accuracy", "valid/perplexity")
"""Metrics, of which a task has one; with `data.holdout` they are on a part of the training set, else on the paper's
validation set."""


def search_metric(row: Mapping[str, Any]) -> float | None:
    """The headline metric of a result row; None if it has none."""
    return next((float(row[name]) for name in HEADLINES if name in row), None)


def lower_is_better(metric: str) -> bool:
    """Of losses and perplexities."""
    return metric.rpartition("/")[2] in ("loss", "nll", "perplexity")


APART = ("task", "model", "model.trains", "clip", "privacy.epsilon")
"""Cells that differ in these keys are not compared."""


def candidates(rows: list[Row], metric: str) -> Any:
    """A data frame with a line for each cell of the search, in their order.

    Columns: ``cell``; ``mean`` and ``std`` of `metric` over ``seeds``, NaN after a run that diverged; ``rivals``, the
    settings among `APART`; ``whole``: whether it is compared, with as many seeds as any and no run that diverged;
    ``best``: whether it is the best of its rivals.

    Raises:
        UserError: no row has that metric.
    """
    import pandas as pd

    if not any(row.get(metric) for row in rows):
        raise UserError(f"no row has {metric}: name a column of the rows with --metric.")
    values = pd.DataFrame({"cell": [row["cell"] for row in rows], "value": [row.get(metric) or "nan" for row in rows]})
    values["value"] = values["value"].astype(float).where(lambda column: column.abs() < math.inf)
    groups = values.groupby("cell", sort=False)["value"]
    found = pd.DataFrame({"mean": groups.mean(skipna=False), "std": groups.std(skipna=False), "seeds": groups.size()})
    found = found.reset_index()
    words = found["cell"].str.split(" ")
    found["rivals"] = [" ".join(part for part in own if part.split("=")[0] in APART) for own in words]
    found["whole"] = (found["seeds"] == found["seeds"].max()) & found["mean"].notna()
    order = found[found["whole"]].sort_values("mean", ascending=lower_is_better(metric), kind="stable")
    found["best"] = found.index.isin(order.drop_duplicates("rivals").index)
    return found


@command
def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m groupwise.sweeps.best", description=__doc__.split("\n")[0])
    parser.add_argument("sweep", help="a search of sweeps/, such as search_sst2")
    parser.add_argument("scale", nargs="?", default=f"scale={PAPER}", help="scale=mini, say")
    parser.add_argument("--metric", help="the column to go by; the task's own headline if none is given")
    parser.add_argument("--measured", type=Path, default=Path("results/measured"), help="where the rows are")
    given = parser.parse_args(arguments)
    path = table_path(given.measured, given.sweep, scale_of(given.scale))
    rows = read_table(path)
    if not rows:
        hint = did_you_mean(given.sweep, (file.stem.rpartition("_")[0] for file in given.measured.glob("*.csv")))
        again = f"python -m groupwise.sweeps.collect {given.sweep} {given.scale} first"
        raise UserError(f"{path} has no rows{hint}: {again}.")
    metric = given.metric or next((name for name in HEADLINES if rows[0].get(name)), HEADLINES[0])
    found = candidates(rows, metric)
    for cell in found[found["best"]].itertuples():
        spread = "" if math.isnan(cell.std) else f" (standard deviation {cell.std:.2f})"
        print(f"{metric} {cell.mean:.2f}{spread}, {cell.seeds} seeds: {cell.cell}")
    for cell in found[~found["whole"]].itertuples():
        print(f"not considered, {cell.seeds} seeds, mean {cell.mean:.2f}: {cell.cell}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
