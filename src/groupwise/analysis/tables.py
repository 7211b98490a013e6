"""Writes the paper's tables with our numbers:  python -m groupwise.analysis.tables cifar   (or all)

Writes `<table>.md`, `.csv` and `.tex` (booktabs) into results/tables. The same rows give the same bytes. `PAGES` are
other pages about these rows, such as `findings.md`. Their summaries are written into docs/, such as docs/findings.md.
"""

import argparse
import math
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import pandas as pd

from groupwise.analysis.results import (
    HYPERPARAMETERS,
    SCALES,
    TABLES,
    Folders,
    Page,
    cost_of,
    make_each,
    number,
    read_measured,
    read_paper,
)
from groupwise.analysis.statistics import UNINFORMATIVE
from groupwise.analysis.table_lines import table_lines
from groupwise.atomic import write_text
from groupwise.errors import command, unknown
from groupwise.rows import between_markers, markdown
from groupwise.sweeps.cells import PAPER, read_sweep

SPECIAL = {letter: f"\\{letter}" for letter in "&%$#_{}"}
SPECIAL |= {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "−": "$-$", "–": "--"}
GREEK = {"ε": r"$\varepsilon$", "δ": r"$\delta$", "η": r"$\eta$", "β": r"$\beta$", "×": r"$\times$"}
TEX = str.maketrans(SPECIAL | GREEK)
"""LaTeX for special characters, and for characters that are missing in fonts."""
LEGEND = (
    "A cell has the paper's number / ours, with the standard deviation over seeds in brackets (of a gain: of paired "
    "differences), our scale, and the number of a remark; – means that there is none. Each scale has its own rows; a "
    "cell with nothing but – may be in the row of another scale."
)


def grid(lines: pd.DataFrame) -> tuple[pd.DataFrame, list[str]]:
    """The table in the paper's layout, with cells as in `LEGEND`, and the remarks [1], [2], … of its cells."""
    lines = lines.assign(remark=[_remark(line) for line in lines.to_dict("records")])
    remarks = list(lines["remark"].unique())
    lines["text"] = [f"{_both(line)} [{remarks.index(line['remark']) + 1}]" for line in lines.to_dict("records")]
    scales = lines[lines["scale"] != ""].groupby("row")["scale"].last()
    places = zip(lines["row"], lines["scale"], strict=True)
    lines["row"] = [f"{row} ({scale or scales[row]})" if row in scales else row for row, scale in places]
    fullest = lines[lines["row"] == lines["row"].mode()[0]]  # columns of the literature's rows come last
    columns = dict.fromkeys([*fullest["column"], *lines["column"]])
    table = lines.pivot(index="row", columns="column", values="text").fillna("–")
    return table.loc[lines["row"].unique(), list(columns)].rename_axis(index=None, columns=None), remarks


def _both(line: Mapping[Any, Any]) -> str:
    if line["status"] == UNINFORMATIVE:
        return f"{line['printed'] or '–'} / not learned {line['scale']}"
    spread = "" if math.isnan(line["std"]) else f" ({line['std']:.2f})"
    scale = "" if line["scale"] in ("", PAPER) else f" {line['scale']}"
    return f"{line['printed'] or '–'} / {number(line['mean'])}{spread}{scale}"


def _remark(line: Mapping[Any, Any]) -> str:
    """The status of a number, its seeds, and the reason for the status."""
    seeds = f"{line['n']} of {line['expected']} seeds" if line["n"] else ""
    run = f"ours: {line['run']}" if line["run"] else ""
    return "; ".join(dict.fromkeys(filter(None, (line["status"], seeds, line["why"], run, line["note"]))))


def as_markdown(title: str, name: str, lines: pd.DataFrame, notes: Sequence[str], errata: Sequence[str]) -> str:
    """The page of a table in Markdown, with the remarks of its cells, and notes."""
    table, remarks = grid(lines)
    parts = [f"# {title}", f"Made by `python -m groupwise.analysis.tables {name}`. {LEGEND}"]
    parts.append(markdown(["", *table], [[row, *cells] for row, *cells in table.itertuples(name=None)]))
    parts.append("\n".join(f"[{place}] {remark}  " for place, remark in enumerate(remarks, 1)).rstrip())
    parts.append("\n".join(f"- {note}" for note in notes))
    links = "; ".join(f"[{text}](../../docs/errata.md#{anchor(text)})" for text in errata)
    return "\n\n".join([*parts, f"Where we depart from the paper: {links}."]) + "\n"


def as_latex(title: str, name: str, lines: pd.DataFrame, notes: Sequence[str], errata: Sequence[str]) -> str:
    """The table in LaTeX, as wide as the text; needs `\\usepackage{booktabs,graphicx}`."""
    table, remarks = grid(lines)
    styled = table.map(tex).rename(index=tex, columns=tex).style
    which = " (reduced, no reproduction): " if set(lines["scale"]) - {"", PAPER} else ": "
    under = [LEGEND, *(f"[{place}] {text}." for place, text in enumerate(remarks, 1)), *notes]
    under.append(f"Where we depart from the paper (docs/errata.md): {'; '.join(errata)}.")
    return "\n".join(
        [
            f"% python -m groupwise.analysis.tables {name}; needs \\usepackage{{booktabs,graphicx}}",
            "\\begin{table}",
            f"\\caption{{The paper's {tex(title.replace(': ', which, 1))}}}\\label{{table:{name}}}",
            "\\resizebox{\\textwidth}{!}{%",
            styled.to_latex(hrules=True, column_format="l" * (1 + len(table.columns))).rstrip() + "}",
            "\\footnotesize",
            *(f"\\par\\noindent {tex(text)}" for text in under),
            "\\end{table}",
            "",
        ]
    )


def tex(text: str) -> str:
    """`text` with LaTeX's special characters escaped."""
    return text.translate(TEX)


def anchor(heading: str) -> str:
    """The anchor of a heading on GitHub."""
    return "".join(letter for letter in heading.lower() if letter.isalnum() or letter in " -_").replace(" ", "-")


ADJACENCY = {"add_remove": "adding or removing one training example"}
SAMPLING = {"poisson": "Poisson sampling", "shuffle": "shuffled batches, so ε is not a guarantee"}
COMMON = ("Counts are centred", "Poisson or shuffled", "The number of steps")
ERRATA = {  # headings in docs/errata.md, the common ones and those that concern a table
    "fixed_per_layer": ("Table 1 and the ablation table disagree", "Hyperparameters were tuned on the test set"),
    "cifar": ("Hyperparameters were tuned on the test set", "The network's block order"),
    "glue": ("What the language experiments leave open",),
    "sst2_epochs": ("What the language experiments leave open",),
    "table2text": ("What the language experiments leave open",),
    "samsum": ("Per-device noise", "What the language experiments leave open"),
    "noise_allocation": ("What the language experiments leave open",),
    "adaptivity": ("Table 1 and the ablation table disagree", "Hyperparameters were tuned on the test set"),
}


def notes(name: str, folders: Folders, lines: pd.DataFrame) -> list[str]:
    """Notes below a table, from its `table_lines`: scales, privacy, provenance and irregularities."""
    used = rows_of(name, folders, lines)
    found = [*_scales(name, used), *_privacy(used), *_provenance(used)]
    flags = lines[lines["flags"] != ""].drop_duplicates(["cell", "flags"])
    found += [f"Flag: {line['row']}, {line['column']}: {line['flags']}." for line in flags.to_dict("records")]
    return found


def rows_of(name: str, folders: Folders, lines: pd.DataFrame) -> pd.DataFrame:
    """The measured rows behind the lines of a table."""
    sweep = read_sweep(folders.sweeps / f"{name}.yaml")
    parts = [read_measured(sweep, scale, folders.measured).rows for scale in lines["scale"].unique() if scale]
    if not parts:
        return pd.DataFrame(columns=["scale", "hash"])
    hashes = {text for listed in lines["hashes"] for text in listed.split()}
    rows = pd.concat(parts, ignore_index=True).astype(object).fillna("")  # scales may have other columns
    return rows[rows["hash"].str[:12].isin(hashes)].reset_index(drop=True)


def _scales(name: str, used: pd.DataFrame) -> list[str]:
    found = [f"scale={scale}: {SCALES[scale]}" for scale in sorted(set(used["scale"]), key=list(SCALES).index)]
    reduced = any(scale != PAPER for scale in used["scale"])
    end = f". Reduced numbers are no reproduction. Their settings: sweeps/{name}.yaml, conf/size." if reduced else "."
    return ["; ".join(found) + end] if found else ["Nothing was measured yet."]


def _privacy(used: pd.DataFrame) -> list[str]:
    if used.empty or "plan.private" not in used:
        return []
    found, noisy = [], used[pd.to_numeric(used["plan.noise_multiplier"], errors="coerce") > 0]
    seeded = noisy[noisy.get("data.public", pd.Series("", noisy.index)) == "True"]
    if len(noisy):
        delta = ", ".join(f"{float(text):.3g}" for text in _values(noisy, "plan.delta"))
        words = [ADJACENCY.get(text, text) for text in _values(noisy, "plan.adjacency")]
        words += [SAMPLING.get(text, text) for text in _values(noisy, "plan.sampling")]
        words += [text.upper() for text in _values(noisy, "plan.accountant")]
        found.append(f"Privacy of {len(noisy)} of {len(used)} runs: δ = {delta}; for {'; '.join(words)}.")
    if len(seeded):
        found.append(
            f"ε as planned for secret keys; in {len(seeded)} of {len(used)} runs, on public data, the noise comes from "
            "a seed, so they can be reproduced, and are not private."
        )
    if others := len(used) - len(seeded) - (used["plan.private"] == "True").sum():
        found.append(f"{others} of {len(used)} runs have no guarantee (no noise, or no Poisson sampling).")
    return found


def _provenance(used: pd.DataFrame) -> list[str]:
    if used.empty:
        return []
    commits = ", ".join(dict.fromkeys(text[:7] for text in _values(used, "git.sha"))) or "none"
    words = f"{len(used)} runs{cost_of(used.to_dict('records'))}; commits {commits}"
    for column, label in (("system.device", "on"), ("versions.torch", "torch")):
        if found := _values(used, column):
            words += f"; {label} {', '.join(found)}"
    return [words + "."]


def _values(rows: pd.DataFrame, column: str) -> list[str]:
    return sorted({text for text in rows[column] if text}) if column in rows else []


def table_page(name: str, folders: Folders) -> str:
    """A table of results with its notes, in Markdown; raises as `table_lines` does."""
    return as_markdown(*_content(name, folders))


def _content(name: str, folders: Folders) -> tuple[str, str, pd.DataFrame, list[str], list[str]]:
    lines = table_lines(name, folders)
    title = read_sweep(folders.sweeps / f"{name}.yaml").title
    return title, name, lines, notes(name, folders, lines), [*COMMON, *ERRATA[name]]


def write_table(name: str, folders: Folders, out: Path) -> str:
    """Write a table of results; returns what to print, and raises as `table_lines` does."""
    content = _content(name, folders)
    lines = content[2]
    write_text(out / f"{name}.csv", lines.to_csv(index=False, lineterminator="\n"))
    write_text(out / f"{name}.md", as_markdown(*content))
    write_text(out / f"{name}.tex", as_latex(*content))
    counts = ", ".join(f"{count} {status}" for status, count in lines["status"].value_counts(sort=False).items())
    return f"{out / name}.md, .csv, .tex: {len(lines)} numbers: {counts}"


def write_hyperparameters(name: str, folders: Folders, out: Path) -> str:
    """Write a table of the paper's settings with their configuration keys; returns what to print."""
    paper = read_paper(name, folders.paper)
    shown = paper[["row", "column", "printed", "note", "metric", "cell"]]
    head = ["setting", "column", "value", "kind", "key", "composed by"]
    lines = shown.itertuples(index=False)
    rows = [[*map(str, line[:4]), *(f"`{text}`" if text else "–" for text in line[4:])] for line in lines]
    parts = [
        f"# {HYPERPARAMETERS[name]}",
        f"Made by `python -m groupwise.analysis.tables {name}` from the paper's numbers. A test composes each "
        "configuration and compares it: with fixed and selected values, and one value of each grid.",
        markdown(head, rows),
    ]
    write_text(out / f"{name}.csv", shown.to_csv(index=False, lineterminator="\n"))
    write_text(out / f"{name}.md", "\n\n".join(parts) + "\n")
    return f"{out / name}.md, .csv: {len(paper)} settings"


PAGES = {"coverage": "coverage", "searches": "searches", "findings": "findings", "benchmarks": "benchmark_tables"}
"""Page -> the module that makes it."""
NAMES = (*TABLES, *HYPERPARAMETERS, *PAGES)


def write_page(name: str, folders: Folders, out: Path, docs: Path) -> str:
    """Write one of `PAGES`, and its parts into docs/<name>.md between markers; returns what to print."""
    made: Page = import_module(f"groupwise.analysis.{PAGES[name]}").page(folders)
    write_text(out / f"{name}.md", made.text)
    prose = docs / f"{name}.md"
    if made.parts and prose.is_file():
        before = text = prose.read_text(encoding="utf-8")
        for marker, content in made.parts.items():
            text = between_markers(text, marker, content, prose)
        if text != before:
            write_text(prose, text)
    return f"{out / name}.md: {made.line}"


@command
def main(arguments: list[str] | None = None, folders: Folders | None = None) -> int:
    """The command line; returns the exit code, 2 if a table could not be made. The others are still made."""
    parser = argparse.ArgumentParser(prog="python -m groupwise.analysis.tables")
    parser.add_argument("names", nargs="+", metavar="NAME", help=f"all, or of {', '.join(NAMES)}")
    parser.add_argument("--out", type=Path, default=Path("results/tables"))
    parser.add_argument("--docs", type=Path, default=Path("docs"), help="folder of the pages with markers")
    given, folders = parser.parse_args(arguments), folders or Folders()
    given.out.mkdir(parents=True, exist_ok=True)

    def write(name: str) -> str:
        if name not in NAMES:
            raise unknown("table or page", name, NAMES)
        if name in PAGES:
            return write_page(name, folders, given.out, given.docs)
        return (write_hyperparameters if name in HYPERPARAMETERS else write_table)(name, folders, given.out)

    return make_each(NAMES if "all" in given.names else dict.fromkeys(given.names), write)


if __name__ == "__main__":
    sys.exit(main())
