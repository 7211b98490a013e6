"""Reads the paper's numbers from `results/paper/`: a line for each number of each table.

Columns of `results/paper/<table>.csv`:

table, row, column
    Where the paper prints it; the row's and the column's headings are joined by " / ".
metric
    The column of measured rows that it is compared with; of a hyperparameter, the key of the configuration.
cell
    Settings that select one cell of the sweep of that name, or "A minus B" for a difference of two; empty where nothing
    of ours is comparable. Of a hyperparameter, what composes the configuration that should have it.
value, std
    As printed; `value` is empty where the paper has a dash and we have a cell.
note
    Why a number is not ours to reproduce, or is not the same thing; of a hyperparameter: fixed, grid or selected.
"""

from argparse import ArgumentParser, Namespace
from dataclasses import dataclass, fields
from pathlib import Path

import pandas as pd

import groupwise
from groupwise.errors import UserError

TABLES = (
    "fixed_per_layer",
    "cifar",
    "glue",
    "sst2_epochs",
    "table2text",
    "samsum",
    "noise_allocation",
    "adaptivity",
)
"""The paper's tables of results, in its order; each has a sweep of its name."""
HYPERPARAMETERS = ("hyperparameters_cifar", "hyperparameters_glue", "hyperparameters_gpt2")
"""The paper's tables of settings."""
COLUMNS = ("table", "row", "column", "metric", "cell", "value", "std", "note")
MINUS = " minus "


@dataclass(frozen=True)
class Folders:
    """Where the analysis reads."""

    paper: Path = Path("results/paper")
    measured: Path = Path("results/measured")
    sweeps: Path = Path("sweeps")

    @classmethod
    def of_checkout(cls) -> "Folders":
        """Those of the checkout that this package is installed from, wherever the program runs: for notebooks."""
        root = Path(groupwise.__file__).resolve().parents[2]
        return cls(*(root / field.default for field in fields(cls)))  # type: ignore[operator]

    @classmethod
    def add_options(cls, parser: ArgumentParser) -> None:
        """--paper, --measured and --sweeps, for the commands of this room."""
        for field in fields(cls):
            parser.add_argument(f"--{field.name}", type=Path, default=field.default)

    @classmethod
    def given(cls, options: Namespace) -> "Folders":
        """What those options say."""
        return cls(**{field.name: getattr(options, field.name) for field in fields(cls)})


def read_paper(name: str, folder: Path = Folders.paper) -> pd.DataFrame:
    """The paper's table `name`: `value` and `std` as numbers, `printed` as the paper has both, the others as text.

    Raises:
        UserError: there is no such table, or it is not what the project came with.
    """
    path = folder / f"{name}.csv"
    if name not in (*TABLES, *HYPERPARAMETERS):
        raise UserError(f"The paper has no table {name!r}: choose one of {', '.join((*TABLES, *HYPERPARAMETERS))}.")
    try:
        frame = pd.read_csv(path, dtype=str, keep_default_na=False)
    except (OSError, ValueError) as error:
        raise UserError(f"The paper's numbers are not in {path} ({str(error).splitlines()[0]}).") from error
    if missing := [column for column in COLUMNS if column not in frame]:
        raise UserError(f"{path} has no column {missing[0]!r}: take the file that the project came with.")
    frame["printed"] = [
        value + (f" ({std})" if std else "") for value, std in zip(frame["value"], frame["std"], strict=True)
    ]
    for column in ("value", "std"):
        numbers = pd.to_numeric(frame[column], errors="coerce")
        if len(odd := frame[numbers.isna() & (frame[column] != "")]):
            raise UserError(f"{path}: {odd.iloc[0][column]!r} at {odd.iloc[0]['row']} is no number.")
        frame[column] = numbers
    return frame


def settings_of(cell: str) -> dict[str, str]:
    """``clip=flat privacy.epsilon=3`` as a dictionary.

    Raises:
        UserError: a word of it has no "=".
    """
    if wrong := [word for word in cell.split() if "=" not in word]:
        raise UserError(f"{wrong[0]!r} in the cell {cell!r} is no KEY=VALUE.")
    return dict(word.split("=", 1) for word in cell.split())
