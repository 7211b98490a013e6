"""Writes the report:  python -m groupwise.analysis.report [--out results/report.html]"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from groupwise.analysis.coverage import coverage
from groupwise.analysis.figure_style import content
from groupwise.analysis.figures import FIGURES, Drawn, make
from groupwise.analysis.figures import title as figure_title
from groupwise.analysis.report.parts import COLUMNS, MARKS, Grid, inline, link, make_grid, promises, to_html
from groupwise.analysis.results import HYPERPARAMETERS, TABLES, Folders, read_all, read_paper
from groupwise.analysis.statistics import STATUSES
from groupwise.analysis.table_lines import table_lines
from groupwise.analysis.tables import SETTINGS, anchor, errata_of, notes
from groupwise.atomic import write_text
from groupwise.errors import UserError, command
from groupwise.rows import SCALES, read_table, table_path
from groupwise.sweeps.cells import PAPER, read_sweep

LIGHT = 1_500_000
"""Bytes that the page should not exceed."""


@dataclass(frozen=True)
class Sample:
    """An input of the test set, one of its references, and what each cell's first seed wrote, by name."""

    source: str
    reference: str
    written: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class TablePart:
    """A table of results; `fault` is why it could not be made."""

    name: str
    title: str
    grid: Grid | None = None
    notes: Sequence[str] = ()
    errata: Sequence[tuple[str, str]] = ()
    samples: Sequence[Sample] = ()
    fault: str = ""

    @property
    def counts(self) -> dict[str, int]:
        return self.grid.counts if self.grid else {}


@dataclass(frozen=True)
class FigurePart:
    """A figure; `fault` is why it could not be drawn."""

    name: str
    title: str
    status: str
    svg: str = ""
    facts: Sequence[tuple[str, str]] = ()
    runs: Sequence[str] = ()
    source: str = ""
    fault: str = ""


def render(folders: Folders, docs: Path, out: Path) -> tuple[str, dict[str, str]]:
    """The page as it will stand in `out`, and what was left out of it with the reason.

    The same rows and documents give the same page.
    """
    tables = [_table(name, folders) for name in TABLES]
    figures = [_figure(name, folders) for name in FIGURES]
    errata, more_errata = _document(docs / "errata.md", out, "errata")
    judged = folders.measured.parent / "tables" / "findings.md"
    findings = Markup("").join([*_document(docs / "findings.md", out, "findings"), *_document(judged, out, "claims")])
    environment = Environment(
        loader=PackageLoader("groupwise.analysis.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    measured = folders.measured
    text = environment.get_template("report.html.j2").render(
        style=Markup(environment.get_template("report.css").render()),
        tables=tables,
        figures=figures,
        totals=_totals(tables),
        statuses=STATUSES,
        marks=MARKS,
        settings=[(SETTINGS[name], _settings(name, folders)) for name in HYPERPARAMETERS],
        cells=_cells(folders),
        findings=findings,
        errata=errata,
        more_errata=more_errata,
        promises=promises(_all_rows(folders)),
        promise_columns=COLUMNS,
        run=lambda digest: link(measured.parent / "runs" / digest / "result.json", out),
        rows=lambda name: link(measured / name, out),
        drawing=lambda name: link(measured.parent / "figures" / name, out),
        doc=lambda name: link(docs / name, out),
    )
    faults = [(part.name, part.fault) for part in tables] + [(part.name, part.fault) for part in figures]
    return text, {name: fault for name, fault in faults if fault}


def _table(name: str, folders: Folders) -> TablePart:
    title = name
    try:
        title = read_sweep(folders.sweeps / f"{name}.yaml").title
        lines = table_lines(name, folders)
        under, samples = notes(name, folders, lines), _samples(name, folders)
    except UserError as error:
        return TablePart(name, title, fault=str(error))
    links = [(text, f"#errata-{anchor(text)}") for text in errata_of(name)]
    return TablePart(name, title, make_grid(lines), under, links, samples)


def _samples(name: str, folders: Folders) -> list[Sample]:
    """The texts of the largest scale that has any."""
    tables = (read_table(table_path(folders.measured, name, scale, "texts")).rows for scale in SCALES)
    by_input: dict[tuple[str, str], dict[str, str]] = {}
    for row in next(filter(None, tables), []):
        by_input.setdefault((row["source"], row["reference"]), {}).setdefault(row["cell"], row["output"])
    return [Sample(source, reference, list(written.items())) for (source, reference), written in by_input.items()]


def _figure(name: str, folders: Folders) -> FigurePart:
    try:
        drawn = make(name, folders)
    except UserError as error:
        return FigurePart(name, figure_title(name), "not run", fault=str(error))
    status = "paper's scale" if drawn.scale == PAPER else "reduced only"
    svg = inline(content(drawn.figure, "svg"), name, f"{figure_title(name)} ({status})")
    runs = [] if drawn.runs is None else [text[:12] for text in drawn.runs.rows["hash"]]
    source = drawn.source.relative_to(folders.measured).as_posix()
    return FigurePart(name, figure_title(name), status, svg, _facts(drawn), runs, source)


def _facts(drawn: Drawn) -> list[tuple[str, str]]:
    if drawn.runs is None:
        return [("measured", drawn.caption)]
    rows, expected = drawn.runs.rows, drawn.runs.expected
    facts = [
        ("runs", f"{len(rows)} of {sum(map(len, expected.values()))}"),
        ("cells", f"{rows['cell'].nunique()} of {len(expected)}"),
        ("scale", drawn.scale),
        ("code", " ".join(sorted({text[:7] for text in rows["git.sha"] if text}))),
    ]
    return facts + ([("flags", "; ".join(flags))] if (flags := drawn.runs.flags()) else [])


def _totals(tables: Sequence[TablePart]) -> dict[str, int]:
    totals = {status: sum(table.counts.get(status, 0) for table in tables) for status in STATUSES}
    return {status: number for status, number in totals.items() if number}


def _cells(folders: Folders) -> list[dict[Any, Any]]:
    """The lines of `coverage`; none where a sweep is not there or at fault, as its table or figure then says."""
    try:
        return coverage(folders).to_dict("records")
    except UserError:
        return []


def _settings(name: str, folders: Folders) -> Any:
    """Lines (setting, column, values, kind) of a table of hyperparameters; the values of a grid side by side."""
    paper = read_paper(name, folders.paper)
    kinds = paper["note"].str.split(";").str[0]
    lines: dict[tuple[str, str], list[tuple[str, bool]]] = {}
    for row, column, printed, kind in zip(paper["row"], paper["column"], paper["printed"], kinds, strict=True):
        lines.setdefault((row, column), []).append((printed, kind == "selected"))
    return [(row, column, values) for (row, column), values in lines.items()]


def _document(path: Path, out: Path, prefix: str) -> tuple[Markup, Markup]:
    if not path.is_file():
        return Markup(f"<p>There is no {Markup.escape(path.name)}.</p>"), Markup("")
    return to_html(path.read_text(encoding="utf-8"), path, out, prefix)


def _all_rows(folders: Folders) -> pd.DataFrame:
    """The rows of all sweeps; files at fault are left out, since their tables and figures already say so."""
    found = []
    for name in dict.fromkeys((*TABLES, *FIGURES)):
        try:
            found += [at.rows for at in read_all(read_sweep(folders.sweeps / f"{name}.yaml"), folders.measured)]
        except UserError:
            continue
    return pd.concat(found, ignore_index=True) if found else pd.DataFrame()


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m groupwise.analysis.report", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("results/report.html"))
    Folders.add_options(parser)
    parser.add_argument("--docs", type=Path, default=Path("docs"))
    given = parser.parse_args(arguments)
    page, left_out = render(Folders.given(given), given.docs, given.out)
    given.out.parent.mkdir(parents=True, exist_ok=True)
    write_text(given.out, page)
    for name, reason in left_out.items():
        print(f"left out: {name}: {reason}", file=sys.stderr)
    size = len(page.encode())
    print(f"{given.out}: {size / 1e6:.2f} MB")
    if size > LIGHT:
        print(f"warning: the page is larger than {LIGHT / 1e6:g} MB.", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
