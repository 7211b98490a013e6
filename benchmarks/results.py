"""Keeps the committed table of results (ratios, provenance, merging a run's rows into the file), and prints it."""

import platform
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any

import pandas as pd
import torch

from benchmarks.meters import floor
from groupwise.analysis.benchmark_rows import THROUGHPUT
from groupwise.atomic import write_text
from groupwise.training.provenance import git_state

COLUMNS = list(THROUGHPUT)
KEY = ["workload", "method", "batch", "layers", "threads", "device", "hardware", "dtype"]
FILE = "throughput.csv"
ROOT = Path(__file__).resolve().parents[1]


def with_ratios(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Add ratio, memory_ratio and floor to the rows of one workload, all against its rows of method `none`.

    ratio: seconds of the faster `none` of the same round over a row's own (CPU seconds on a CPU, event time on a GPU).
    memory_ratio: own peak over the smaller peak of `none`. floor: see `benchmarks.meters`.
    """
    plain = [row for row in rows if row["method"] == "none" and row["status"] == "ok"]
    fastest: dict[int, float] = {}
    for row in plain:
        fastest[row["round"]] = min(_seconds(row), fastest.get(row["round"], float("inf")))
    smallest = min((row["peak_bytes"] for row in plain), default=None)
    counted = min((row["flops"] for row in plain if row["flops"]), default=None)
    return [
        row
        | {
            "ratio": fastest[row["round"]] / _seconds(row)
            if row["status"] == "ok" and row["round"] in fastest
            else None,
            "memory_ratio": row["peak_bytes"] / smallest if row["peak_bytes"] and smallest else None,
            "floor": floor(counted, row["flops"]),
        }
        for row in rows
    ]


def _seconds(row: dict[str, Any]) -> float:
    return row["wall_seconds"] if row["device"] == "cuda" else row["cpu_seconds"]


def provenance(device: str) -> dict[str, Any]:
    """Where rows come from: machine, commit, versions, date (UTC)."""
    state = git_state(ROOT)
    packages = {name: _version(name) for name in ("opacus", "transformers")}
    return {
        "hardware": torch.cuda.get_device_name() if device == "cuda" else processor(),
        "commit": state["sha"],
        "dirty": state["dirty"],
        "torch": torch.__version__,
        **packages,
        "python": platform.python_version(),
        "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%MZ"),
    }


def processor() -> str:
    """The processor's name, as Linux tells it; elsewhere its architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else f"{platform.machine()} ({sys.platform})"


def merge(
    path: Path, rows: Sequence[dict[str, Any]], columns: Sequence[str] = COLUMNS, key: Sequence[str] = KEY
) -> None:
    """Put rows into the CSV at `path`, whole or not at all, in place of older ones with the same values in `key`."""
    columns = list(columns)
    new = pd.DataFrame(list(rows), columns=columns).astype(object)
    frames = [new]
    if path.exists():
        old = pd.read_csv(path, dtype=object, keep_default_na=False)
        fresh = {_key(row, key) for row in new.to_dict("records")}
        frames = [old[[_key(row, key) not in fresh for row in old.to_dict("records")]], new]
    frame = pd.concat(frames)[columns].map(_written)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, frame.to_csv(index=False, lineterminator="\n"))


def _key(row: dict[str, Any], key: Sequence[str]) -> tuple[str, ...]:
    return tuple(_written(row[name]) for name in key)


def _written(value: Any) -> str:
    """As it stands in the file: six digits of a measured number, nothing for what is missing."""
    if value is None or (isinstance(value, float) and value != value):
        return ""
    if isinstance(value, float) and value.is_integer():  # a count, of a column where others are missing
        return f"{value:.0f}"
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "absent"


BUSY = 1.05  # wall over CPU seconds of one thread
HEAD = ("method", "format", "examples/s", "ratio", "[min .. max]", "memory", "floor", "noise ms")


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows of one workload, with ratios, as lines of text."""
    first = rows[0]
    depth = f", {first['layers']} layers" if first["layers"] else ""
    machine = f"{first['device']}, {first['threads']} threads, {first['dtype']}"
    title = f"{first['workload']}: B {first['batch']}{depth}, {machine}"
    cells = [HEAD, *(_line(group) for group in _groups(rows))]
    widths = [max(len(line[column]) for line in cells if column < len(line) and len(line) > 3) for column in range(8)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=False)).rstrip() for line in cells]
    return "\n".join(["", title, *lines, *_busy(rows)])


def _busy(rows: Sequence[dict[str, Any]]) -> list[str]:
    """A warning where one thread got less than its core: others then disturb its CPU time, too."""
    timed = [row for row in rows if row["status"] == "ok" and row["device"] == "cpu" and row["threads"] == 1]
    share = median([row["wall_seconds"] / row["cpu_seconds"] for row in timed] or [1.0])
    return [] if share < BUSY else [f"the machine was busy: wall time was {share:.2f} times CPU time; measure again"]


def _groups(rows: Sequence[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    keys = dict.fromkeys((row["method"], row["memory_format"]) for row in rows)
    return [[row for row in rows if (row["method"], row["memory_format"]) == key] for key in keys]


def _line(rows: list[dict[str, Any]]) -> tuple[str, ...]:
    first = rows[0]
    bad = [row["status"] for row in rows if row["status"] != "ok"]
    if bad:
        return (first["method"], first["memory_format"], bad[0])
    ratios = [row["ratio"] for row in rows]
    return (
        first["method"],
        first["memory_format"],
        f"{median(row['examples_per_second'] for row in rows):.4g}",
        f"{median(ratios):.3f}",
        f"[{min(ratios):.3f} .. {max(ratios):.3f}]",
        f"{first['memory_ratio']:.3f}",
        "" if first["floor"] is None else f"{first['floor']:.3f}",
        f"{1000 * median(row['noise_seconds'] for row in rows):.3g}",
    )
