"""Draws the parts of the report: figures, grids of numbers, promises of privacy, prose."""

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import pandas as pd
from markdown_it import MarkdownIt
from markupsafe import Markup

from groupwise.analysis.statistics import STATUSES
from groupwise.analysis.tables import ADJACENCY, SAMPLING, anchor, number

COLOURS = {
    "#000000": "currentColor",
    "#ffffff": "var(--page)",
    "#d9d9d9": "var(--rule)",
    "#666666": "var(--muted)",
    "#999999": "var(--muted)",
    "#444444": "var(--dim)",
    "#222222": "currentColor",
    "#0072b2": "var(--blue)",
    "#8fbbd9": "var(--pale)",
}
"""Colours of `figure_style` that a dark page changes."""
NARROW = 520
"""Pixels up to which a figure may shrink to the width of a phone; a wider one is scrolled instead..."""
LEAST = 560
"""... and is never narrower than this."""
FONT = "system-ui, 'DejaVu Sans', sans-serif"


def inline(svg: bytes, name: str, title: str) -> Markup:
    """The SVG of a figure as an element of a page, with an accessible name and ids that no other figure has."""
    text = svg.decode()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'(?<=\sid=")', f"{name}-", text)
    text = re.sub(r"(?<=url\(#)", f"{name}-", text)
    text = re.sub(r'(?<=href="#)', f"{name}-", text)
    for colour, variable in COLOURS.items():
        text = text.replace(colour, variable)
    text = text.replace("'DejaVu Sans'", FONT)
    width = re.search(r'<svg[^>]*? width="([0-9.]+)pt"', text)
    text = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", text, count=1)
    text = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", text, count=1)
    natural = float(width[1]) / 0.75 if width else NARROW
    size = f"--width: {natural:.0f}px; --least: {LEAST if natural > NARROW else 0}px"
    start = f'<svg role="img" aria-label="{Markup.escape(title)}" style="{size}"'
    return Markup(re.sub(r"\n\s*", "\n", text.replace("<svg", start, 1)))


BETWEEN = " / "
"""Joins the levels of a heading."""
MARKS = {"reproduced": "✓", "differs": "≠", "incomplete": "…", "not in the paper": "+"}
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


PLAN = ("plan.dataset_size", "plan.delta", "plan.adjacency", "plan.sampling", "plan.accountant", "plan.private")
COLUMNS = ("task", "N", "δ", "for", "batches", "accountant", "ε spent", "runs", "a guarantee")


def promises(rows: pd.DataFrame) -> list[dict[str, str]]:
    """Lines with the keys `COLUMNS`, from measured rows all columns text; each run counts once, whatever its sweeps."""
    if rows.empty or any(column not in rows for column in (*PLAN, "plan.spent_epsilon")):
        return []
    rows = rows.drop_duplicates("hash").fillna(dict.fromkeys(PLAN, ""))  # other sweeps' rows may lack a column
    rows = rows.assign(task=rows["cell"].str.extract(r"\btask=(\S+)", expand=False).fillna(""))
    found = []
    for place, same in rows.groupby(["task", *PLAN], sort=True):
        task, size, delta, adjacency, sampling, accountant, private = (str(text) for text in place)
        found.append(
            {
                "task": task,
                "N": f"{_number(size):,.0f}" if size else "–",
                "δ": f"{_number(delta):.3g}" if delta else "–",
                "for": ADJACENCY.get(adjacency, adjacency) or "–",
                "batches": SAMPLING.get(sampling, sampling) or "–",
                "accountant": accountant.upper() or "–",
                "ε spent": _spent(same) if private == "True" else "–",
                "runs": str(len(same)),
                "a guarantee": "yes" if private == "True" else "no",
            }
        )
    return found


def _spent(rows: pd.DataFrame) -> str:
    targets = pd.to_numeric(rows["plan.epsilon"], errors="coerce")
    spent = pd.to_numeric(rows["plan.spent_epsilon"], errors="coerce")
    most = spent.groupby(targets).max()
    return ", ".join(f"{value:.3f} of {target:g}" for target, value in most.items())


def _number(text: str) -> float:
    return float(pd.to_numeric(text, errors="coerce"))


def to_html(text: str, page: Path, out: Path, prefix: str) -> tuple[Markup, Markup]:
    """Markdown as HTML, in two parts: up to the end of its first table, and the rest.

    The title is left out, headings go one level down, and their anchors begin with `prefix`. `page` is the file that
    links are relative to, `out` the file that they will stand in.
    """
    parser = MarkdownIt("commonmark", {"html": False}).enable("table")
    parser.add_render_rule("table_open", lambda *_: '<div class="wide" tabindex="0" role="group"><table>\n')
    parser.add_render_rule("table_close", lambda *_: "</table></div>\n")
    tokens = _without_title(parser.parse(re.sub(r"<!--.*?-->\n?", "", text, flags=re.DOTALL)))
    for place, token in enumerate(tokens):
        if token.type in ("heading_open", "heading_close"):
            if token.type == "heading_open":
                token.attrSet("id", f"{prefix}-{anchor(tokens[place + 1].content)}")
            token.tag = f"h{min(int(token.tag[1]) + 1, 6)}"
        for child in token.children or []:
            if child.type == "link_open":
                child.attrSet("href", _relative(str(child.attrGet("href")), page, out, prefix))
            elif child.type == "image":
                child.attrSet("src", _relative(str(child.attrGet("src")), page, out, prefix))
    end = next((place + 1 for place, token in enumerate(tokens) if token.type == "table_close"), len(tokens))
    parts = [parser.renderer.render(part, parser.options, {}) for part in (tokens[:end], tokens[end:])]
    return Markup(parts[0]), Markup(parts[1])


def _without_title(tokens: list[Any]) -> list[Any]:
    return tokens[3:] if tokens and tokens[0].tag == "h1" else tokens


def _relative(target: str, page: Path, out: Path, prefix: str) -> str:
    if re.match(r"[a-z]+:", target):
        return target
    if target.startswith("#"):
        return f"#{prefix}-{target[1:]}"
    path, mark, place = target.partition("#")
    return link(page.parent / path, out) + mark + place


def link(target: Path, out: Path) -> str:
    """A relative link from the page `out` to a file."""
    return Path(os.path.relpath(target, out.parent)).as_posix()
