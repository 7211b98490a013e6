"""Writes the paper's tables beside what was measured:  python -m groupwise.analysis.tables cifar   (or all)

Writes `<table>.md`, `.csv` and `.tex` (booktabs) into results/tables. The same rows give the same bytes.
"""

import argparse
import sys
from pathlib import Path

from groupwise.analysis.benchmark_tables import markdown
from groupwise.analysis.paper import HYPERPARAMETERS, TABLES, Folders, read_paper
from groupwise.analysis.table_lines import table_lines
from groupwise.analysis.table_text import as_latex, as_markdown, errata_of, notes
from groupwise.atomic import write_text
from groupwise.errors import UserError
from groupwise.sweeps.cells import read_sweep

SETTINGS = {
    "hyperparameters_cifar": "Settings for WRN16-4 on CIFAR-10",
    "hyperparameters_glue": "Settings for RoBERTa on SST-2",
    "hyperparameters_gpt2": "Settings for GPT-2 on E2E and DART",
}


def table_page(name: str, folders: Folders | None = None) -> str:
    """A table of results with its notes, in Markdown.

    Raises:
        UserError: as `table_lines`.
    """
    folders = folders or Folders()
    lines = table_lines(name, folders)
    title = read_sweep(folders.sweeps / f"{name}.yaml").title
    return as_markdown(title, name, lines, notes(name, folders, lines), errata_of(name))


def write_table(name: str, folders: Folders, out: Path) -> str:
    """Write a table of results; returns what to print.

    Raises:
        UserError: as `table_lines`.
    """
    lines = table_lines(name, folders)
    title = read_sweep(folders.sweeps / f"{name}.yaml").title
    under, errata = notes(name, folders, lines), errata_of(name)
    out.mkdir(parents=True, exist_ok=True)
    write_text(out / f"{name}.csv", lines.to_csv(index=False, lineterminator="\n"))
    write_text(out / f"{name}.md", as_markdown(title, name, lines, under, errata))
    write_text(out / f"{name}.tex", as_latex(title, name, lines, under, errata))
    counts = ", ".join(f"{count} {status}" for status, count in lines["status"].value_counts(sort=False).items())
    return f"{out / name}.md, .csv, .tex: {len(lines)} numbers: {counts}"


def write_hyperparameters(name: str, folders: Folders, out: Path) -> str:
    """Write a table of the paper's settings, with the key that holds each here; returns what to print."""
    paper = read_paper(name, folders.paper)
    shown = paper[["row", "column", "printed", "note", "metric", "cell"]]
    head = ["setting", "column", "value", "kind", "key", "composed by"]
    rows = [
        [*map(str, line[:4]), *(f"`{text}`" if text else "–" for text in line[4:])]
        for line in shown.itertuples(index=False)
    ]
    page = "\n\n".join(
        [
            f"# {SETTINGS[name]}",
            f"Made by `python -m groupwise.analysis.tables {name}` from the paper's numbers. A test composes each "
            "configuration: it has the fixed and selected values, and one of each grid.",
            markdown(head, rows),
        ]
    )
    out.mkdir(parents=True, exist_ok=True)
    write_text(out / f"{name}.csv", shown.to_csv(index=False, lineterminator="\n"))
    write_text(out / f"{name}.md", page + "\n")
    return f"{out / name}.md, .csv: {len(paper)} settings"


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit code: 0, or 2 where a table could not be made, after writing the others."""
    parser = argparse.ArgumentParser(prog="python -m groupwise.analysis.tables")
    parser.add_argument("names", nargs="+", metavar="NAME", help=f"all, or of {', '.join((*TABLES, *HYPERPARAMETERS))}")
    parser.add_argument("--out", type=Path, default=Path("results/tables"))
    Folders.add_options(parser)
    given = parser.parse_args(arguments)
    folders = Folders.given(given)
    names = [*TABLES, *HYPERPARAMETERS] if "all" in given.names else list(dict.fromkeys(given.names))
    failed = False
    for name in names:
        try:
            if name in HYPERPARAMETERS:
                print(write_hyperparameters(name, folders, given.out))
            else:
                print(write_table(name, folders, given.out))
        except UserError as error:
            print(f"error: {error}", file=sys.stderr)
            failed = True
    return 2 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
