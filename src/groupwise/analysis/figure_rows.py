"""Reads the rows of the figures' sweeps at the largest scale there is, and brings them to means."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from groupwise.analysis.measured import Measured, read_all
from groupwise.analysis.paper import Folders, settings_of
from groupwise.analysis.statistics import summarise
from groupwise.errors import UserError
from groupwise.sweeps.cells import read_sweep

IDENTITY = ("cell", "seed", "hash")
"""Of the columns of rows that belong to a run, those that say to which."""
MAKERS = {"_curves": "collect", "_norms": "gradient_norms"}
"""What makes the rows that belong to runs, by how the name of their file ends."""


def read_figure_rows(name: str, folders: Folders, metrics: Sequence[str] = ()) -> Measured:
    """The rows of the sweep `name` at the largest scale that has any, with `metrics` as finite numbers.

    Raises:
        UserError: there are none, or they have a fault (as `read_measured` finds it).
    """
    sweep = read_sweep(folders.sweeps / f"{name}.yaml")
    cells = {cell.name for scale in ("paper", *sweep.scales) for cell in sweep.cells(scale)}
    found = read_all(sweep, folders.measured, {cell: list(metrics) for cell in sorted(cells)})
    if not found:
        raise UserError(
            f"There are no rows of {name} in {folders.measured}: make them with make sweep-{name} SCALE=mini."
        )
    return found[0]


def read_companion(
    name: str, measured: Measured, folder: Path, suffix: str, place: Sequence[str], numbers: Sequence[str]
) -> pd.DataFrame:
    """Rows that belong to the runs of `measured`: `<name>_<scale><suffix>.csv`, several a run.

    `place` are the columns that make a row the only one of its kind within its run; `numbers` are finite in every row.

    Raises:
        UserError: there is no such file, a column is missing, a number is not finite, a row is of a run
            that was not measured, or two rows are of one place.
    """
    path = folder / f"{name}_{measured.scale}{suffix}.csv"
    if not path.is_file():
        maker = f"{MAKERS[suffix]} {name} scale={measured.scale}"
        raise UserError(f"There are no rows in {path}: make them with python -m groupwise.sweeps.{maker}.")
    frame = pd.read_csv(path, dtype={"cell": str, "hash": str})
    columns = dict.fromkeys((*IDENTITY, *place, *numbers))
    if missing := [column for column in columns if column not in frame]:
        raise UserError(f"{path} has no column {missing[0]!r}: collect the sweep {name} again.")
    if frame.empty:
        raise UserError(f"{path} has no rows: collect the sweep {name} again.")
    known = set(measured.rows[list(IDENTITY)].itertuples(index=False, name=None))
    strange = [row not in known for row in frame[list(IDENTITY)].itertuples(index=False, name=None)]
    if any(strange):
        raise _fault(path, frame[strange], "is of no run that was measured")
    for column in numbers:
        frame[column] = pd.to_numeric(frame[column], errors="coerce")
        if len(odd := frame[~np.isfinite(frame[column])]):
            raise _fault(path, odd, f"has no finite {column}")
    if len(again := frame[frame.duplicated(["hash", *place])]):
        raise _fault(path, again, "is there twice")
    return frame.assign(scale=measured.scale)


def _fault(path: Path, rows: pd.DataFrame, words: str) -> UserError:
    first = rows.iloc[0]
    return UserError(f"{path}: a row of {first['cell']} seed={first['seed']} {words}; nothing of the file is used.")


def with_settings(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows with a column for each setting of their cells, as the paper has it, in place of any of that name."""
    settings = pd.DataFrame([settings_of(cell) for cell in rows["cell"]], index=rows.index)
    return rows.drop(columns=[name for name in settings if name in rows]).join(settings)


def summary(rows: pd.DataFrame, keys: Sequence[str], metric: str) -> pd.DataFrame:
    """One line for each combination of `keys`, over its seeds: `keys`, ``mean``, ``low``, ``high``, ``n``.

    ``low`` and ``high`` are the ends of the 95 % t-interval of the mean, NaN where there is one seed.
    """
    lines = []
    for place, values in rows.groupby(list(keys), sort=False, dropna=False)[metric]:
        found = summarise(list(values))
        at = dict(zip(keys, place, strict=True))
        lines.append(at | {"mean": found.mean, "low": found.low, "high": found.high, "n": found.n})
    return pd.DataFrame(lines, columns=[*keys, "mean", "low", "high", "n"])


def seeds_in_words(counts: pd.Series) -> str:
    """``Mean and 95 % t-interval over 3 seeds``, for the note of a figure."""
    least, most = counts.min(), counts.max()
    if most == 1:
        return "One seed"
    return f"Mean and 95 % t-interval over {most if least == most else f'{least} to {most}'} seeds"
