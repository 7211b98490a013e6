"""Finds the best cell of a search by its mean over seeds:  python -m groupwise.sweeps.best search_sst2 scale=mini"""

import argparse
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
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


@dataclass(frozen=True)
class Candidate:
    """A cell of the search."""

    name: str
    rivals: tuple[str, ...]
    """Its settings among `APART`, which all cells that it is compared with share."""
    mean: float
    std: float | None
    seeds: int


def candidates(rows: list[Row], metric: str) -> list[Candidate]:
    """One a cell, with the mean of `metric` over its seeds; a run that diverged makes the mean nan."""
    values: dict[str, list[float]] = {}
    for row in rows:
        values.setdefault(row["cell"], []).append(float(row.get(metric) or math.nan))
    return [
        Candidate(
            name,
            tuple(part for part in name.split(" ") if part.split("=")[0] in APART),
            mean(runs),
            stdev(runs) if len(runs) > 1 and all(map(math.isfinite, runs)) else None,
            len(runs),
        )
        for name, runs in values.items()
    ]


def best(rows: list[Row], metric: str) -> tuple[list[Candidate], list[Candidate]]:
    """The best of each set of rivals; and those not considered: diverged, or of fewer seeds than others have.

    Raises:
        UserError: no row has that metric.
    """
    if not any(row.get(metric) for row in rows):
        raise UserError(f"no row has {metric}: name a column of the rows with --metric.")
    found = candidates(rows, metric)
    seeds = max(candidate.seeds for candidate in found)
    whole = [candidate for candidate in found if candidate.seeds == seeds and math.isfinite(candidate.mean)]
    sign = -1 if lower_is_better(metric) else 1
    chosen: dict[tuple[str, ...], Candidate] = {}
    for candidate in whole:
        held = chosen.get(candidate.rivals)
        if held is None or sign * candidate.mean > sign * held.mean:
            chosen[candidate.rivals] = candidate
    return list(chosen.values()), [candidate for candidate in found if candidate not in whole]


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
    rows = read_table(path).rows
    if not rows:
        hint = did_you_mean(given.sweep, (file.stem.rpartition("_")[0] for file in given.measured.glob("*.csv")))
        again = f"python -m groupwise.sweeps.collect {given.sweep} {given.scale} first"
        raise UserError(f"{path} has no rows{hint}: {again}.")
    metric = given.metric or next((name for name in HEADLINES if rows[0].get(name)), HEADLINES[0])
    chosen, left_out = best(rows, metric)
    for candidate in chosen:
        spread = "" if candidate.std is None else f" (standard deviation {candidate.std:.2f})"
        print(f"{metric} {candidate.mean:.2f}{spread}, {candidate.seeds} seeds: {candidate.name}")
    for candidate in left_out:
        print(f"not considered, {candidate.seeds} seeds, mean {candidate.mean:.2f}: {candidate.name}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
