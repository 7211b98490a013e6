"""A table of the paper as the page shows it: the paper's rows and columns, each number above what was measured."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import pandas as pd

from groupwise.analysis.comparison import STATUSES
from groupwise.analysis.table_formats import number

BETWEEN = " / "
"""Joins the levels of a heading."""
MARKS = {
    "reproduced": "✓",
    "differs": "≠",
    "incomplete": "…",
    "not in the paper": "+",
}
"""What tells a status from the others without colour; reduced numbers are striped."""


@dataclass(frozen=True)
class Box:
    """One number.

    Attributes:
        status: as `table_lines` has it.
        printed: the paper's text.
        ours: the mean over seeds, or nothing.
        half: half the 95 % interval, or nothing.
        facts: what to show of where it comes from, as (term, text).
        runs: the first twelve digits of the hashes of its runs.
    """

    status: str
    printed: str
    ours: str
    half: str
    facts: tuple[tuple[str, str], ...]
    runs: tuple[str, ...]

    @property
    def mark(self) -> str:
        return MARKS.get(self.status, "")

    @property
    def short(self) -> str:
        """The facts that matter most, in a line."""
        known = dict(self.facts)
        return "; ".join(f"{term} {known[term]}" for term in ("seeds", "95 % interval", "scale") if term in known)


@dataclass(frozen=True)
class Grid:
    """A table: `heads` are its rows of column headings as (text, columns spanned), `groups` its rows by group."""

    heads: list[list[tuple[str, int]]]
    groups: list[tuple[str, list[tuple[str, list[Box | None]]]]]
    counts: dict[str, int]
    reasons: list[str]


def make_grid(lines: pd.DataFrame) -> Grid:
    """Lines of `table_lines`, set out as the paper does: a row for each ``row``, a column for each ``column``."""
    boxes = {(line["row"], line["column"]): _box(line) for line in lines.to_dict("records")}
    columns = _columns(list(boxes))
    groups: dict[str, list[tuple[str, list[Box | None]]]] = {}
    for row in dict.fromkeys(lines["row"]):
        group, _, label = row.rpartition(BETWEEN)
        groups.setdefault(group, []).append((label, [boxes.get((row, column)) for column in columns]))
    reasons = [f"{why} ({count})" for why, count in lines[lines["status"] == "not run"]["why"].value_counts().items()]
    return Grid(_heads(columns), list(groups.items()), count(lines), reasons)


def _columns(places: list[tuple[str, str]]) -> list[str]:
    """All columns, in an order that every row agrees with; those under one heading side by side."""
    by_row: dict[str, list[str]] = {}
    for row, column in places:
        by_row.setdefault(row, []).append(column)
    longest, *others = sorted(by_row.values(), key=len, reverse=True)
    columns = list(longest)
    for own in others:
        for place, column in enumerate(own):
            if column not in columns:
                after = next((later for later in own[place:] if later in columns), None)
                columns.insert(len(columns) if after is None else columns.index(after), column)
    order = {name: place for place, name in enumerate(dict.fromkeys(_first(column) for column in columns))}
    return sorted(columns, key=lambda column: order[_first(column)])  # stable


def count(lines: pd.DataFrame) -> dict[str, int]:
    """How many lines have each status, in the order of `STATUSES`."""
    found = lines["status"].value_counts()
    return {status: int(found[status]) for status in STATUSES if status in found}


def _first(column: str) -> str:
    return column.split(BETWEEN)[0]


def _heads(columns: list[str]) -> list[list[tuple[str, int]]]:
    if not all(column.count(BETWEEN) == 1 for column in columns):
        return [[(column, 1) for column in columns]]
    above = [(text, len(list(same))) for text, same in groupby(columns, key=_first)]
    return [above, [(column.split(BETWEEN)[1], 1) for column in columns]]


def _box(line: Mapping[Any, Any]) -> Box:
    measured = line["n"] > 0
    facts: list[tuple[str, str]] = []
    if measured:
        facts.append(("seeds", f"{line['n']} of {line['expected']}"))
        if not math.isnan(line["low"]):
            facts += [("95 % interval", f"{line['low']:.2f} to {line['high']:.2f}"), ("std", f"{line['std']:.2f}")]
        facts += [("scale", line["scale"]), ("metric", line["metric"]), ("cell", line["cell"])]
    facts.append(("status", line["status"] + (f": {line['why']}" if line["why"] else "")))
    if line["note"] and line["note"] != line["why"]:
        facts.append(("note", line["note"]))
    if line["flags"]:
        facts.append(("flags", line["flags"]))
    if line["commits"]:
        facts.append(("code", line["commits"]))
    ours = number(line["mean"]) if measured else ""
    half = f"{line['high'] - line['mean']:.2f}" if measured and not math.isnan(line["low"]) else ""
    runs = tuple(dict.fromkeys(line["hashes"].split()))
    return Box(line["status"], line["printed"], ours, half, tuple(facts), runs)
