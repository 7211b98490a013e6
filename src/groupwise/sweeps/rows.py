"""Reads what finished runs say and writes `results/measured/`, where a row that stays keeps its bytes."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from groupwise.atomic import write_text
from groupwise.config.identity import stable_config
from groupwise.config.schema import RunConfig
from groupwise.errors import UserError


def result_row(folder: Path, config: RunConfig, expected: str) -> dict[str, Any] | None:
    """The row in `result.json`, without the machine's paths; None where the run is not done.

    Args:
        expected: the hash of `config`, which the folder is named by.

    Raises:
        UserError: the file cannot be read, lacks a key of the configuration, or holds another configuration's result.
    """
    if not (folder / "DONE").is_file():
        return None
    path = folder / "result.json"
    again = "run that cell again with overwrite=true"
    try:
        row = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({str(error).splitlines()[0]}): {again}.") from error
    settings = stable_config(config)
    if absent := [key for key in ("hash", *settings) if not isinstance(row, dict) or key not in row]:
        raise UserError(f"{path} has no {absent[0]}: {again}.")
    if row["hash"] != expected:
        raise UserError(
            f"{path} has the hash {str(row['hash'])[:12]} and lies in the folder of {expected[:12]}: {again}."
        )
    for key, value in settings.items():
        if row[key] != value:
            raise UserError(f"{path} says {key}={row[key]}, and the configuration of its hash has {value}: {again}.")
    return {key: value for key, value in row.items() if not key.startswith("paths.")}


def curve_rows(folder: Path) -> list[dict[str, Any]]:
    """Step, seconds and metrics of each evaluation of a run, from `metrics.jsonl`.

    Raises:
        UserError: a line of it cannot be read.
    """
    path = folder / "metrics.jsonl"
    rows = []
    try:
        for line in path.read_text(encoding="utf-8").splitlines():
            logged = json.loads(line)
            found = {key: value for key, value in logged.items() if key.startswith(METRICS)}
            if found:
                rows.append({"step": logged["step"], "seconds": logged.get("seconds"), **found})
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"{path} cannot be read ({error}): run that cell again with overwrite=true.") from error
    return rows


Row = dict[str, str]
KEYS = ("sweep", "cell", "seed", "scale")
FIRST = ("task", "model.name", "model.fresh", "clip.name", "privacy.epsilon", "optim.learning_rate")
METRICS = ("valid/", "test/", "nonprivate/train_")
"""How the names of what an evaluation finds begin."""


@dataclass
class Table:
    """Rows in their order."""

    rows: list[Row] = field(default_factory=list)

    def add(self, first: Mapping[str, str], rows: Iterable[Mapping[str, Any]]) -> None:
        """Rows of a run, each after the columns `first`."""
        self.rows += [{**{key: _text(value) for key, value in row.items()}, **first} for row in rows]

    def keep(self, rows: Iterable[Row]) -> None:
        """Rows that were there before."""
        self.rows += rows

    def of(self, cell: str, seed: int, digest: str) -> list[Row]:
        """The rows of that cell and seed, if their configuration is that one."""
        wanted = (cell, str(seed), digest)
        return [row for row in self.rows if (row.get("cell"), row.get("seed"), row.get("hash")) == wanted]

    def lost(self, other: Table) -> list[str]:
        """Cell and seed of the rows that `other` has not got."""
        there = {(row["cell"], row["seed"], row["hash"]) for row in other.rows}
        here = dict.fromkeys((row.get("cell", ""), row.get("seed", ""), row.get("hash", "")) for row in self.rows)
        return [f"{cell} seed={seed}" for cell, seed, digest in here if (cell, seed, digest) not in there]


def read_table(path: Path) -> Table:
    """The table as it is; empty where there is none.

    Raises:
        UserError: it cannot be read.
    """
    if not path.is_file():
        return Table()
    try:
        with open(path, encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file, strict=True))
    except (OSError, csv.Error, UnicodeDecodeError) as error:
        raise UserError(f"{path} is no table ({error}): mend it, or remove it.") from error
    if any(None in row or None in row.values() for row in rows):
        raise UserError(f"{path} is no table (a line has more or fewer values than columns): mend it, or remove it.")
    return Table(rows)


def write_table(path: Path, table: Table, by_step: bool = False) -> None:
    """Write it whole or not at all: cell and seed first, then what it is about, metrics, and the rest by name."""
    present = {key for row in table.rows for key in row}
    first = [*KEYS, *(("hash", "step", "seconds") if by_step else FIRST)]
    first = [key for key in first if key in present]
    metrics = [key for prefix in METRICS for key in sorted(present) if key.startswith(prefix)]
    columns = [*first, *metrics, *sorted(present - {*first, *metrics})]
    write_text(path, _csv(columns, table.rows))


def _csv(columns: Sequence[str], rows: Iterable[Row]) -> str:
    out = io.StringIO()
    writer = csv.DictWriter(out, columns, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def _text(value: Any) -> str:
    return "" if value is None else str(value)
