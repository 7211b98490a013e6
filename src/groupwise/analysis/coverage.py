"""Lists all cells of all tables and figures: reproduced, reduced only, or not run and why.

    python -m groupwise.analysis.coverage

writes results/tables/coverage.md.
"""

import argparse
import sys
from collections import Counter
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
    Folders,
    file_of,
    read_floors,
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
"""The figures that are made of the benchmark's rows, and the paper's hardware."""
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
    lines = []
    for name in (*TABLES, *KINDS):
        sweep = read_sweep(folders.sweeps / f"{name}.yaml")
        compared = _compared(name, folders) if name in TABLES else {}
        seeds = {scale: _seeds(sweep, scale, folders, KINDS[name].suffix if name in KINDS else "") for scale in SHOWN}
        weak = {scale: _weak(sweep, scale, folders) for scale in SHOWN if scale != PAPER}
        for cell in dict.fromkeys(cell.name for cell in sweep.cells(PAPER)):
            counts = {scale: found.get(cell) for scale, found in seeds.items()}
            useless = {scale: found[cell] for scale, found in weak.items() if cell in found}
            status, why = compared.get(cell) or _uncompared(counts, useless, sweep, cell)
            shown = {scale: f"{count[0]} of {count[1]}" if count else "" for scale, count in counts.items()}
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
    counts: dict[str, tuple[int, int] | None], useless: dict[str, str], sweep: Sweep, cell: str
) -> tuple[str, str]:
    at_paper = counts[PAPER] or (0, 0)
    if at_paper[0]:
        return (RUN, "") if at_paper[0] >= at_paper[1] else (INCOMPLETE, f"{at_paper[0]} of {at_paper[1]} seeds")
    for scale, count in counts.items():
        if count and count[0]:
            if scale in useless:
                return UNINFORMATIVE, f"scale={scale}; {useless[scale]}"
            return REDUCED, f"scale={scale}; {needs([cell])}"
    return NOT_RUN, why_not_run(sweep, [cell])


def _weak(sweep: Sweep, scale: str, folders: Folders) -> dict[str, str]:
    """Cell -> why its rows at that scale say nothing; cells whose rows do, or may, say something are left out."""
    path, floors = file_of(sweep, scale, folders.measured), read_floors(folders.measured)
    if not path.is_file():
        return {}
    found: dict[str, str] = {}
    for cell, own in pd.read_csv(path).groupby("cell"):
        task = settings_of(str(cell)).get("task", "")
        metrics = [metric for at, metric in floors if at == task and metric in own and own[metric].notna().any()]
        whys = (why_uninformative(task, metric, float(own[metric].mean()), floors) for metric in metrics)
        if why := next(filter(None, whys), ""):
            found[str(cell)] = why
    return found


def _seeds(sweep: Sweep, scale: str, folders: Folders, ending: str) -> dict[str, tuple[int, int]]:
    """Cell -> how many of its seeds have rows at that scale, and how many there are."""
    if scale != PAPER and scale not in sweep.scales:
        return {}
    path = folders.measured / f"{sweep.name}_{scale}{ending}.csv"
    rows: set[tuple[str, int]] = set()
    if path.is_file():
        try:
            frame = pd.read_csv(path, usecols=["cell", "seed"], dtype={"cell": str, "seed": int})
        except ValueError as error:
            raise UserError(
                f"{path} does not parse ({str(error).splitlines()[0]}): collect the sweep again."
            ) from error
        rows = set(frame.drop_duplicates().itertuples(index=False, name=None))
    expected = [(cell.name, cell.seed) for cell in sweep.cells(scale)]
    total = Counter(name for name, _ in expected)
    there = Counter(name for name, seed in expected if (name, seed) in rows)
    return {name: (there[name], total[name]) for name in total}


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
    counts = [
        [str(name), *(str(int((group["status"] == word).sum())) for word in statuses), str(len(group))]
        for name, group in lines.groupby("sweep", sort=False)
    ]
    counts.append(["all", *(str(int((lines["status"] == word).sum())) for word in statuses), str(len(lines))])
    speed = "; ".join(measured_on) if measured_on else "nothing yet"
    benchmarks = " ".join(f"`{name}` (paper: {paper})." for name, paper in BENCHMARKS.items())
    parts = [
        "# Coverage: every cell of every table and figure",
        "Made by `python -m groupwise.analysis.coverage`. A cell is one line here and one run for each of its "
        "seeds; a cell that two sweeps share is in both.",
        markdown(["sweep", *statuses, "cells"], counts),
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
