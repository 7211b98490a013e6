"""Writes the paper's tables beside what was measured:  python -m groupwise.analysis.tables cifar   (or all)

Writes `<table>.md`, `.csv` and `.tex` (booktabs) into results/tables. The same rows give the same bytes.
"""

import argparse
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from groupwise.analysis.results import HYPERPARAMETERS, TABLES, Folders, cost_of, read_measured, read_paper
from groupwise.analysis.table_lines import table_lines
from groupwise.atomic import write_text
from groupwise.errors import UserError
from groupwise.rows import markdown
from groupwise.sweeps.cells import PAPER, Sweep, read_sweep, text

HEAD = ("row", "column", "paper", "measured", "std", "95 % interval", "n", "scale", "status")
TEX = {
    "\\": r"\textbackslash{}",
    "&": r"\&",
    "%": r"\%",
    "$": r"\$",
    "#": r"\#",
    "_": r"\_",
    "{": r"\{",
    "}": r"\}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "ε": r"$\varepsilon$",
    "δ": r"$\delta$",
    "η": r"$\eta$",
    "β": r"$\beta$",
    "×": r"$\times$",
    "−": "$-$",
    "–": "--",
}


def body(lines: pd.DataFrame) -> tuple[list[list[str]], list[str]]:
    """The cells of the table, in the order of `HEAD`, and the remarks that its statuses refer to as [1], [2], ..."""
    said = [remark(why, note) for why, note in zip(lines["why"], lines["note"], strict=True)]
    remarks = list(dict.fromkeys(words for words in said if words))
    rows = []
    for line, words in zip(lines.to_dict("records"), said, strict=True):
        mark = f" [{remarks.index(words) + 1}]" if words else ""
        seeds = f"{line['n']} of {line['expected']}" if line["n"] else "–"
        span = "–" if math.isnan(line["low"]) else f"{number(line['low'])} to {number(line['high'])}"
        rows.append(
            [
                line["row"],
                line["column"],
                line["printed"] or "–",
                number(line["mean"]),
                number(line["std"]),
                span,
                seeds,
                line["scale"] or "–",
                line["status"] + mark,
            ]
        )
    return rows, remarks


def as_markdown(title: str, name: str, lines: pd.DataFrame, notes: Sequence[str], errata: Sequence[str]) -> str:
    """A page: the table, the remarks that its statuses refer to, and notes."""
    rows, remarks = body(lines)
    parts = [f"# {title}", f"Made by `python -m groupwise.analysis.tables {name}`.", markdown(list(HEAD), rows)]
    if remarks:
        parts.append("\n".join(f"[{place}] {text}  " for place, text in enumerate(remarks, 1)).rstrip())
    if notes:
        parts.append("\n".join(f"- {note}" for note in notes))
    if errata:
        links = "; ".join(f"[{text}](../../docs/errata.md#{anchor(text)})" for text in errata)
        parts.append(f"Where we part from the paper: {links}.")
    return "\n\n".join(parts) + "\n"


def as_latex(title: str, name: str, lines: pd.DataFrame, notes: Sequence[str], errata: Sequence[str]) -> str:
    """A longtable with booktabs' rules; needs `\\usepackage{booktabs,longtable}`."""
    rows, remarks = body(lines)
    head = " & ".join(f"\\textbf{{{tex(text)}}}" for text in HEAD)
    under = [f"[{place}] {text}." for place, text in enumerate(remarks, 1)] + list(notes)
    if errata:
        under.append(f"Where we part from the paper (docs/errata.md): {'; '.join(errata)}.")
    return "\n".join(
        [
            f"% python -m groupwise.analysis.tables {name}; needs \\usepackage{{booktabs,longtable}}",
            "\\begingroup\\footnotesize\\setlength{\\tabcolsep}{3pt}",
            "\\begin{longtable}{llrrrrlll}",
            f"\\caption{{{tex(title)}}}\\label{{table:{name}}}\\\\",
            "\\toprule",
            f"{head} \\\\",
            "\\midrule",
            "\\endhead",
            *(" & ".join(map(tex, row)) + " \\\\" for row in rows),
            "\\bottomrule",
            "\\end{longtable}",
            *(f"\\noindent {tex(text)}\\par" for text in under),
            "\\endgroup",
            "",
        ]
    )


def remark(why: str, note: str) -> str:
    """Why a line has its status, and what is to be known of the paper's number, each once."""
    return "; ".join(dict.fromkeys(text for text in (why, note) if text))


def number(value: Any) -> str:
    """Two decimals, or a dash where there is none."""
    return "–" if math.isnan(value) else f"{value:.2f}".replace("-", "−")


def tex(text: str) -> str:
    """`text` with LaTeX's own characters escaped."""
    return "".join(TEX.get(letter, letter) for letter in text)


def anchor(heading: str) -> str:
    """The anchor that a heading has on GitHub."""
    return "".join(letter for letter in heading.lower() if letter.isalnum() or letter in " -_").replace(" ", "-")


SCALES = {
    "paper": "the paper's cell",
    "midi": "real data; images of 16 pixels on a network a quarter as wide, texts on a GPT-2 of a million parameters",
    "mini": "real data, smaller and on a small network, a short training",
    "demo": "embedded or generated data and a small network",
}
ADJACENCY = {"add_remove": "adding or removing one training example"}
SAMPLING = {"poisson": "Poisson samples", "shuffle": "shuffled batches, so ε is as published and no guarantee"}
COMMON = ("Counts are centred", "Poisson or shuffled", "The number of steps")
ERRATA = {
    "fixed_per_layer": ("Table 1 and the ablation table disagree", "Hyperparameters were tuned on the test set"),
    "cifar": ("Hyperparameters were tuned on the test set", "The network's block order"),
    "glue": ("What the language experiments leave open",),
    "sst2_epochs": ("What the language experiments leave open",),
    "table2text": ("What the language experiments leave open",),
    "samsum": ("Per-device noise", "What the language experiments leave open"),
    "noise_allocation": ("What the language experiments leave open",),
    "adaptivity": ("Table 1 and the ablation table disagree", "Hyperparameters were tuned on the test set"),
}


def errata_of(name: str) -> list[str]:
    """The headings in docs/errata.md that bear on a table."""
    return [*COMMON, *ERRATA.get(name, ())]


def notes(name: str, folders: Folders, lines: pd.DataFrame) -> list[str]:
    """Sentences for the foot of a table, given its `table_lines`: on privacy, scales, provenance and what is odd."""
    used = rows_of(name, folders, lines)
    sweep = read_sweep(folders.sweeps / f"{name}.yaml")
    found = [*_scales(used), *_changes(sweep, used), *_privacy(used), *_provenance(used)]
    flags = lines[lines["flags"] != ""].drop_duplicates(["cell", "flags"])
    found += [f"Flag: {line['row']}, {line['column']}: {line['flags']}." for line in flags.to_dict("records")]
    return found


def rows_of(name: str, folders: Folders, lines: pd.DataFrame) -> pd.DataFrame:
    """The measured rows that the lines of a table were made from."""
    sweep = read_sweep(folders.sweeps / f"{name}.yaml")
    parts = [read_measured(sweep, scale, folders.measured).rows for scale in lines["scale"].unique() if scale]
    if not parts:
        return pd.DataFrame(columns=["scale", "hash"])
    hashes = {text for listed in lines["hashes"] for text in listed.split()}
    rows = pd.concat(parts, ignore_index=True)
    return rows[rows["hash"].str[:12].isin(hashes)].reset_index(drop=True)


def _scales(used: pd.DataFrame) -> list[str]:
    found = [f"scale={scale}: {SCALES[scale]}" for scale in sorted(set(used["scale"]), key=list(SCALES).index)]
    reduced = any(scale != PAPER for scale in used["scale"])
    end = ". Reduced numbers are no reproduction: compare them among themselves only." if reduced else "."
    return ["; ".join(found) + end] if found else ["Nothing was measured yet."]


def _changes(sweep: Sweep, used: pd.DataFrame) -> list[str]:
    """A scale's replacements for the paper's settings, beyond its sizes (`conf/size`)."""
    found = []
    for scale in sorted(set(used["scale"])):
        words = []
        for key, change in (sweep.scales.get(scale) or {}).items():
            pairs = change if isinstance(change, Mapping) else {"": change}
            words += [_change(key, text(old) if old != "" else "", new) for old, new in pairs.items()]
        if words:
            found.append(f"At scale={scale}: {'; '.join(words)}.")
    return found


def _change(key: str, old: str, new: object) -> str:
    if new is None:
        return f"{key}={old} left out"
    if isinstance(new, Mapping):
        return f"{key}={old} with {', '.join(f'{name}={text(value)}' for name, value in new.items())}"
    return f"{key}={text(new)}" + (f" for {old}" if old else "")


def _privacy(used: pd.DataFrame) -> list[str]:
    if used.empty or "plan.private" not in used:
        return []
    private, found = used[used["plan.private"] == "True"], []
    public = used[used.get("data.public", pd.Series("", used.index)) == "True"]
    if len(public):
        found.append(f"{len(public)} of {len(used)} runs are of public data: can be made again, not a private release.")
    if len(private):
        delta = _listed(f"{float(text):.3g}" for text in _values(private, "plan.delta"))
        neighbours = _listed(ADJACENCY.get(text, text) for text in _values(private, "plan.adjacency"))
        batches = _listed(SAMPLING.get(text, text) for text in _values(private, "plan.sampling"))
        accountant = _listed(text.upper() for text in _values(private, "plan.accountant"))
        found.append(f"Privacy: δ = {delta}; for {neighbours}; {batches}" + (f"; {accountant}." if accountant else "."))
    if others := len(used) - len(private) - len(public):
        found.append(f"{others} of {len(used)} runs carry no guarantee (no noise, or no Poisson samples).")
    return found


def _provenance(used: pd.DataFrame) -> list[str]:
    if used.empty:
        return []
    commits = _listed(sorted({text[:7] for text in used["git.sha"] if text})) or "none"
    words = f"{len(used)} runs{cost_of(used.to_dict('records'))}; commits {commits}"
    for column, label in (("system.device", "on"), ("versions.torch", "torch")):
        if found := _listed(_values(used, column)):
            words += f"; {label} {found}"
    return [words + "."]


def _values(rows: pd.DataFrame, column: str) -> list[str]:
    return sorted({text for text in rows[column] if text}) if column in rows else []


def _listed(words: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(words))


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
