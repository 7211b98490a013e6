"""Reads and writes CSV files of measured rows with their provenance, and prints new rows."""

import platform
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from benchmarks.meters import floor
from groupwise.analysis.benchmark_rows import MACHINE
from groupwise.atomic import write_text
from groupwise.training.provenance import git_state, processor

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Table:
    """A CSV of measured rows.

    Args:
        file: its name.
        key: the columns that identify a measurement; its new rows replace its old ones.
        shown: the columns that are printed.
    """

    file: str
    key: tuple[str, ...]
    shown: tuple[str, ...] = ()

    def rows(self, folder: str | Path) -> pd.DataFrame:
        """The rows of the file, all cells as text; no rows if there is no file."""
        path = Path(folder) / self.file
        if not path.exists():
            return pd.DataFrame(columns=list(self.key))
        return pd.read_csv(path, dtype=str, keep_default_na=False)

    def add(self, folder: str | Path, rows: Sequence[dict[str, Any]]) -> None:
        """Add rows with their machine and versions to the file, atomically, and print their medians over rounds."""
        source, old = provenance(rows[0]["device"]), self.rows(folder)
        new = pd.DataFrame([row | source for row in rows]).astype(object).map(_written)
        new = new.reindex(columns=list(dict.fromkeys([*new, *self.key])), fill_value="")
        replaced = pd.MultiIndex.from_frame(old[[*self.key]]).isin(pd.MultiIndex.from_frame(new[[*self.key]]))
        frame = pd.concat([old[~replaced], new])
        path = Path(folder) / self.file
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, frame.fillna("").to_csv(index=False, lineterminator="\n"))
        print(_as_text(pd.DataFrame(rows).reindex(columns=list(self.shown))), flush=True)


THROUGHPUT = Table(
    "throughput.csv",
    ("workload", "method", "batch", "layers", *MACHINE),
    ("workload", "batch", "dtype", "method", "memory_format", "examples_per_second", "ratio", "memory_ratio", "status"),
)


def with_ratios(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Add plain_seconds, ratio, memory_ratio and floor to the rows of one workload, against its rows of method `none`.

    plain_seconds: of the faster `none` of the same round (CPU seconds on a CPU, event time on a GPU); later rows may
    replace that of `none`. ratio: plain_seconds over a row's own seconds. memory_ratio: own peak over the smaller peak
    of `none`. floor: see `benchmarks.meters`.
    """
    plain = [row for row in rows if row["method"] == "none" and row["status"] == "ok"]
    fastest: dict[int, float] = {}
    for row in plain:
        fastest[row["round"]] = min(seconds_of(row), fastest.get(row["round"], float("inf")))
    smallest = min((row["peak_bytes"] for row in plain), default=None)
    counted = min((row["flops"] for row in plain if row["flops"]), default=None)
    return [
        row
        | {
            "plain_seconds": (first := fastest.get(row["round"]) if row["status"] == "ok" else None),
            "ratio": first / seconds_of(row) if first else None,
            "memory_ratio": row["peak_bytes"] / smallest if row["peak_bytes"] and smallest else None,
            "floor": floor(counted, row["flops"]),
        }
        for row in rows
    ]


def seconds_of(row: dict[str, Any]) -> float:
    """The seconds that are compared: wall time on a GPU; on a CPU processor time, which other programs disturb less."""
    return row["wall_seconds"] if row["device"] == "cuda" else row["cpu_seconds"]


def provenance(device: str) -> dict[str, Any]:
    """The provenance of rows: machine, commit, versions, date (UTC)."""
    state = git_state(ROOT)
    packages = {name: _version(name) for name in ("opacus", "transformers")}
    return {
        "hardware": hardware(device),
        "commit": state["sha"],
        "dirty": state["dirty"],
        "torch": torch.__version__,
        **packages,
        "python": platform.python_version(),
        "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%MZ"),
    }


def hardware(device: str) -> str:
    """The name of the GPU, or of the processor: its model on Linux, its architecture elsewhere."""
    return torch.cuda.get_device_name() if device == "cuda" else processor()


def _written(value: Any) -> str:
    """The text of a cell: six digits of a measured number, empty for a missing value."""
    if value is None or (isinstance(value, float) and value != value):
        return ""
    if isinstance(value, float) and value.is_integer():  # a count, in a column with missing values
        return f"{value:.0f}"
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "absent"


def _as_text(frame: pd.DataFrame) -> str:
    """A table for the terminal: rows that differ only in measured numbers become one row of medians."""
    measured = list(frame.select_dtypes(float))
    if measured and len(measured) < len(frame.columns):
        frame = frame.groupby(list(frame.columns.difference(measured, sort=False)), sort=False, dropna=False)
        frame = frame.median().reset_index()
    return frame.to_string(index=False, na_rep="", float_format="{:.4g}".format)
