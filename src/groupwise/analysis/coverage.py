"""Lists all cells of all tables and figures: reproduced, reduced only, or not run and why.

    python -m groupwise.analysis.coverage

writes results/tables/coverage.md.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from groupwise.analysis.benchmark_rows import MACHINE, in_words, read_rows
from groupwise.analysis.claims import CLAIMS
from groupwise.analysis.figures import KINDS
from groupwise.analysis.results import (
    CONSTANT,
    MINUS,
    SHOWN,
    TABLES,
    Floors,
    Folders,
    read_all,
    read_floors,
    seeds_of,
    settings_of,
    why_uninformative,
)
from groupwise.analysis.searches import searches
from groupwise.analysis.statistics import (
    DIFFERS,
    INCOMPLETE,
    NOT_RUN,
    QUOTED,
    REDUCED,
    REPRODUCED,
    STATUSES,
    UNINFORMATIVE,
    needs,
    why_not_run,
)
from groupwise.analysis.table_lines import table_lines
from groupwise.atomic import write_text
from groupwise.errors import UserError, command
from groupwise.rows import markdown
from groupwise.sweeps.cells import PAPER, Sweep, read_sweep

BENCHMARKS = {"throughput": "one A6000", "runtime_breakdown": "one Titan RTX"}
"""Figures drawn from the benchmark's rows -> the paper's hardware."""
RUN = "run in full"
COLUMNS = ("sweep", "cell", *SHOWN, "status", "why")
WORDS = STATUSES | {
    RUN: "a figure's cell at scale=paper with all its seeds: the paper prints no number to compare it with"
}


def coverage(folders: Folders | None = None) -> pd.DataFrame:
    """One line a cell of each table and figure.

    Columns: `COLUMNS`; those named by a scale are "2 of 3" seeds, or empty where the scale does not have the cell.

    Raises:
        UserError: a sweep is not there, or rows are at fault.
    """
    folders = folders or Folders()
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
    return pd.DataFrame(lines, columns=list(COLUMNS))


def _compared(name: str, folders: Folders) -> dict[str, tuple[str, str]]:
    """The status of each cell of a table: the least favourable of its numbers'."""
    order = (NOT_RUN, DIFFERS, INCOMPLETE, UNINFORMATIVE, REDUCED, REPRODUCED)
    found: dict[str, tuple[str, str]] = {}
    for line in table_lines(name, folders).to_dict("records"):
        if line["cell"] and MINUS not in line["cell"]:
            status = REPRODUCED if line["status"] not in order else line["status"]
            kept = found.get(line["cell"])
            if kept is None or order.index(status) < order.index(kept[0]):
                found[line["cell"]] = (status, line["why"])
    return found


def _uncompared(
    there: dict[str, pd.DataFrame], expected: int, sweep: Sweep, cell: str, floors: Floors
) -> tuple[str, str]:
    """The status of a figure's cell, from its rows at the largest scale that has any."""
    if not there:
        return NOT_RUN, why_not_run(sweep, [cell])
    scale, own = next(iter(there.items()))
    if scale == PAPER:
        return (RUN, "") if len(own) >= expected else (INCOMPLETE, f"{len(own)} of {expected} seeds")
    task = settings_of(cell).get("task", "")
    for metric in (metric for at, metric in floors if at == task and metric in own):
        values = pd.to_numeric(own[metric], errors="coerce")
        if values.notna().any() and (why := why_uninformative(task, metric, float(values.mean()), floors)):
            return UNINFORMATIVE, f"scale={scale}; {why}"
    return REDUCED, f"scale={scale}; {needs([cell])}"


def refuse_unread(folders: Folders) -> None:
    """Refuse a file of rows that no table, figure, claim or search reads: all committed rows must be shown.

    Raises:
        UserError: naming the file; or there are reduced rows without the constant-prediction baseline.
    """
    endings = [(name, ending) for name in TABLES for ending in ("", "_texts")]
    endings += [(name, ending) for name, kind in KINDS.items() for ending in {"", kind.suffix}]
    endings += [(claim.contrast.sweep, "") for claim in CLAIMS]
    read = {f"{name}_{scale}{ending}.csv" for name, ending in endings for scale in SHOWN} | {CONSTANT}
    read |= {path.name for path in searches(folders.sweeps, folders.measured).values()}
    paths = sorted(folders.measured.glob("*.csv"))
    if not (folders.measured / CONSTANT).is_file() and any(not path.stem.endswith(f"_{PAPER}") for path in paths):
        raise UserError(
            f"There is no {folders.measured / CONSTANT}, the constant-prediction baseline of reduced rows: make "
            "it with python scripts/constant_answers.py."
        )
    for path in paths:
        if path.name not in read:
            raise UserError(f"{path} is read by no table, figure, claim or search: show its rows, or remove it.")


def machines(measured: Path) -> list[str]:
    """The machine configurations that the speed benchmark was run on, in words."""
    path = measured / "benchmarks" / "throughput.csv"
    if not path.is_file():
        return []
    rows = read_rows(path)
    return sorted({in_words(tuple(at)) for at in rows[list(MACHINE)].drop_duplicates().itertuples(index=False)})


def page(lines: pd.DataFrame, measured_on: Sequence[str]) -> str:
    """The list as Markdown: counts for each sweep, the meaning of the statuses, then every cell."""
    statuses = [
        word for word in (REPRODUCED, RUN, DIFFERS, INCOMPLETE, REDUCED, UNINFORMATIVE, NOT_RUN) if word != QUOTED
    ]
    counts = pd.crosstab(lines["sweep"], lines["status"])
    counts = counts.reindex(index=lines["sweep"].unique(), columns=statuses, fill_value=0)
    counts.loc["all"] = counts.sum()
    counts["cells"] = counts.sum(axis=1)
    speed = "; ".join(measured_on) if measured_on else "nothing yet"
    benchmarks = " ".join(f"`{name}` (paper: {paper})." for name, paper in BENCHMARKS.items())
    parts = [
        "# Coverage: every cell of every table and figure",
        "Made by `python -m groupwise.analysis.coverage`. A cell is one line here and one run for each of its "
        "seeds; a cell that two sweeps share is in both.",
        markdown(["sweep", *counts], [list(map(str, row)) for row in counts.itertuples()]),
        "\n".join(f"- {word}: {WORDS[word]}." for word in statuses),
        f"Figures of speed and memory, made of the benchmark's rows: {benchmarks} Measured here on: {speed}.",
    ]
    for name, group in lines.groupby("sweep", sort=False):
        rows = [
            [f"`{line['cell']}`", *(line[scale] or "–" for scale in SHOWN), line["status"], line["why"] or "–"]
            for line in group.to_dict("records")
        ]
        parts += [f"## {name}", markdown(["cell", *SHOWN, "status", "why"], rows)]
    return "\n\n".join(parts) + "\n"


@command
def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m groupwise.analysis.coverage")
    parser.add_argument("--out", type=Path, default=Path("results/tables"))
    Folders.add_options(parser)
    given = parser.parse_args(arguments)
    refuse_unread(Folders.given(given))
    lines = coverage(Folders.given(given))
    text = page(lines, machines(given.measured))
    given.out.mkdir(parents=True, exist_ok=True)
    write_text(given.out / "coverage.md", text)
    counts = ", ".join(f"{count} {status}" for status, count in lines["status"].value_counts(sort=False).items())
    print(f"{given.out / 'coverage.md'}: {len(lines)} cells: {counts}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
