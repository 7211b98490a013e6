"""Compares each number of a table of the paper with what was measured, one row per number."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from groupwise.analysis.results import (
    MINUS,
    Floors,
    Folders,
    Measured,
    matching,
    read_all,
    read_floors,
    read_paper,
    run_in_words,
    seeds_of,
    settings_of,
    why_uninformative,
)
from groupwise.analysis.statistics import compare, summarise
from groupwise.errors import UserError
from groupwise.sweeps.cells import PAPER, Sweep, read_sweep


def table_lines(name: str, folders: Folders) -> pd.DataFrame:
    """One row for each number of the paper's table `name`, with what was measured.

    Numbers under the same row heading form a block. Each scale has rows of its own in it, the largest first.

    Columns: ``mean``, ``n``, ``std`` and the ends of the 95 % t-interval ``low``, ``high`` are over seeds, ``expected``
    is the planned number of seeds; ``scale`` is empty if nothing was measured; ``status`` and ``why`` are from
    `compare`; ``hashes`` (12 digits, as in names of run folders) and ``commits`` are separated by spaces; ``printed``
    is the paper's text; ``run`` is the model and training of the rows; ``flags`` lists irregularities.

    Raises:
        UserError: no such table or sweep, a row that does not select one cell of the sweep, or invalid rows.
    """
    paper = read_paper(name, folders.paper)
    sweep = read_sweep(folders.sweeps / f"{name}.yaml")
    places = _places(paper, sweep, folders.paper / f"{name}.csv")
    scales = read_all(sweep, folders.measured, _wanted(paper, places))
    floors = read_floors(folders.measured)
    lines = []
    for _, block in paper.assign(cells=places).groupby(paper["row"].str.split(" / ").str[0], sort=False):
        numbers = block.to_dict("records")
        there = [at for at in scales if any(at.has(number["cells"]) for number in numbers)]
        for at in there[:-1]:
            lines += [_line(number, at, sweep, floors) for number in numbers if at.has(number["cells"])]
        for number in numbers:
            found = [at for at in there if at.has(number["cells"])]
            if not found or found[-1] is there[-1]:
                lines.append(_line(number, found[-1] if found else None, sweep, floors))
    return pd.DataFrame(lines)


def _places(paper: pd.DataFrame, sweep: Sweep, path: Path) -> list[list[str]]:
    """For each number: its cell, the two cells of a difference, or none."""
    known = list(dict.fromkeys(cell.name for cell in sweep.cells(PAPER)))
    places = []
    for text in paper["cell"]:
        selectors = text.split(MINUS) if text else []
        found = [matching(selector, known) for selector in selectors]
        for selector, cells in zip(selectors, found, strict=True):
            if len(cells) != 1:
                raise UserError(f"{path}: {selector!r} selects {len(cells)} cells of the sweep {sweep.name}, not one.")
        places.append([cells[0] for cells in found])
    return places


def _wanted(paper: pd.DataFrame, places: Sequence[Sequence[str]]) -> dict[str, list[str]]:
    wanted: dict[str, list[str]] = {}
    for metric, cells in zip(paper["metric"], places, strict=True):
        for cell in cells:
            wanted.setdefault(cell, []).append(metric)
    return {cell: sorted(set(metrics)) for cell, metrics in wanted.items()}


def _line(number: Mapping[Any, Any], source: Measured | None, sweep: Sweep, floors: Floors) -> dict[str, Any]:
    cells = number["cells"]
    values, used, flags = pd.Series(dtype=float), pd.DataFrame(), []
    if source is not None:
        values, used = _values(source, cells, number["metric"])
        flags = list(dict.fromkeys(flag for cell in cells for flag in source.flags_of(cell)))
    seeds = seeds_of(sweep, PAPER) if source is None else source.expected
    expected = min((len(seeds[cell]) for cell in cells), default=0)
    summary = summarise(list(values))
    scale = source.scale if source is not None and summary.n else ""
    weak = ""
    if len(used):
        best = float(used.groupby("cell")[number["metric"]].mean().max())
        weak = why_uninformative(settings_of(cells[0]).get("task", ""), number["metric"], best, floors)
    status, why = compare(number, summary, expected, scale, cells, sweep, weak)
    return {
        **{name: number[name] for name in ("row", "column", "metric")},
        "paper": number["value"],
        "paper_std": number["std"],
        "mean": summary.mean,
        "n": summary.n,
        "expected": expected,
        **{name: getattr(summary, name) for name in ("std", "low", "high")},
        "scale": scale,
        "status": status,
        "why": why,
        "hashes": " ".join(text[:12] for text in used.get("hash", ())),
        "commits": " ".join(sorted({text[:7] for text in used.get("git.sha", ()) if text})),
        "cell": MINUS.join(cells),
        "printed": number["printed"],
        "note": number["note"],
        "run": "; ".join(dict.fromkeys(map(run_in_words, used.to_dict("records")))),
        "flags": "; ".join(flags),
    }


def _values(source: Measured, cells: Sequence[str], metric: str) -> tuple[pd.Series, pd.DataFrame]:
    """The metric by seed (for a difference, at the seeds that both cells have), and its rows."""
    columns = [source.of(cell).set_index("seed")[metric] for cell in cells]
    values = columns[0] if len(columns) == 1 else (columns[0] - columns[1]).dropna()
    used = pd.concat([source.of(cell) for cell in cells])
    return values, used[used["seed"].isin(values.index)]
