"""Prints one line a method, medians over rounds with their range."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

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
