"""Lists all cells of all tables and figures, with their status: reproduced, reduced only, not run ..."""

import math

import pandas as pd

from groupwise.analysis.figures import KINDS
from groupwise.analysis.results import (
    MINUS,
    SHOWN,
    TABLES,
    Floors,
    Folders,
    Page,
    read_all,
    read_floors,
    seeds_of,
    settings_of,
    why_uninformative,
)
from groupwise.analysis.statistics import (
    DIFFERS,
    INCOMPLETE,
    NOT_RUN,
    REDUCED,
    REPRODUCED,
    STATUSES,
    UNINFORMATIVE,
    UNPRINTED,
    compare,
    summarise,
)
from groupwise.analysis.table_lines import table_lines
from groupwise.rows import markdown
from groupwise.sweeps.cells import PAPER, Sweep, read_sweep

RUN = "run in full"
LISTED = (REPRODUCED, RUN, DIFFERS, INCOMPLETE, REDUCED, UNINFORMATIVE, NOT_RUN)
WORDS = STATUSES | {
    RUN: "a cell of a figure, at scale=paper with all seeds; the paper prints no number to compare it with"
}


def coverage(folders: Folders) -> pd.DataFrame:
    """One row per cell of each table and figure.

    Columns: sweep, cell, `SHOWN`, status, why. A column named by a scale counts seeds ("2 of 3"), or is empty if the
    scale does not have the cell. Raises `UserError` if a sweep is missing, or rows are invalid.
    """
    floors = read_floors(folders.measured)
    lines = []
    for name in (*TABLES, *KINDS):
        sweep = read_sweep(folders.sweeps / f"{name}.yaml")
        compared = _compared(name, folders) if name in TABLES else {}
        measured = {at.scale: at for at in read_all(sweep, folders.measured)}
        seeds = {scale: seeds_of(sweep, scale) for scale in SHOWN if scale == PAPER or scale in sweep.scales}
        for cell in seeds[PAPER]:
            there = {scale: at.of(cell) for scale, at in measured.items() if len(at.of(cell))}
            status, why = compared.get(cell) or _uncompared(there, len(seeds[PAPER][cell]), sweep, cell, floors)
            shown = dict.fromkeys(SHOWN, "")
            for scale, of in seeds.items():
                shown[scale] = f"{len(there.get(scale, ()))} of {len(of[cell])}" if cell in of else ""
            lines.append({"sweep": name, "cell": cell, **shown, "status": status, "why": why})
    return pd.DataFrame(lines)


def _compared(name: str, folders: Folders) -> dict[str, tuple[str, str]]:
    """The status of each cell of a table: the least favourable status of its numbers."""
    order = (NOT_RUN, DIFFERS, INCOMPLETE, UNINFORMATIVE, REDUCED, REPRODUCED, RUN)
    found: dict[str, tuple[str, str]] = {}
    lines = table_lines(name, folders).drop_duplicates(["row", "column"])  # the largest scale comes first
    for line in lines.to_dict("records"):
        if line["cell"] and MINUS not in line["cell"]:
            status = RUN if line["status"] == UNPRINTED else line["status"]
            kept = found.get(line["cell"])
            if kept is None or order.index(status) < order.index(kept[0]):
                found[line["cell"]] = (status, line["why"])
    return found


def _uncompared(
    there: dict[str, pd.DataFrame], expected: int, sweep: Sweep, cell: str, floors: Floors
) -> tuple[str, str]:
    """The status of a figure's cell, from its rows at the largest scale that has any."""
    scale, own = next(iter(there.items()), ("", pd.DataFrame()))
    task, weak = settings_of(cell).get("task", ""), ""
    for metric in (metric for at, metric in floors if at == task and metric in own):
        values = pd.to_numeric(own[metric], errors="coerce")
        weak = weak or (why_uninformative(task, metric, float(values.mean()), floors) if values.notna().any() else "")
    seeds = summarise([0.0] * len(own))  # the paper prints no value to compare with
    status, why = compare({"note": "", "value": math.nan}, seeds, expected, scale, [cell], sweep, weak)
    return (RUN if status == UNPRINTED else status), why


def page(folders: Folders) -> Page:
    """The page: counts for each sweep, the meaning of each status, and every cell; raises as `coverage`."""
    lines = coverage(folders)
    counts = pd.crosstab(lines["sweep"], lines["status"])
    counts = counts.reindex(index=lines["sweep"].unique(), columns=list(LISTED), fill_value=0)
    counts.loc["all"] = counts.sum()
    counts["cells"] = counts.sum(axis=1)
    parts = [
        "# Coverage: every cell of every table and figure",
        "Made by `python -m groupwise.analysis.tables coverage`. A cell is one line here, with one run per seed. A "
        "cell of two sweeps is listed in both.",
        markdown(["sweep", *counts], [list(map(str, row)) for row in counts.itertuples()]),
        "\n".join(f"- {word}: {WORDS[word]}." for word in LISTED),
        "The figures of speed and memory are in [docs/benchmarks.md](../../docs/benchmarks.md).",
    ]
    for name, group in lines.groupby("sweep", sort=False):
        group = group.assign(cell="`" + group["cell"] + "`").drop(columns="sweep").replace("", "–")
        parts += [f"## {name}", markdown([*group], group.to_numpy().tolist())]
    totals = ", ".join(f"{count} {status}" for status, count in lines["status"].value_counts(sort=False).items())
    return Page("\n\n".join(parts) + "\n", f"{len(lines)} cells: {totals}")
