"""Writes the lines of a table as Markdown and as LaTeX (booktabs)."""

import math
from collections.abc import Sequence
from typing import Any

import pandas as pd

from groupwise.analysis.benchmark_tables import markdown

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
    remarks = list(dict.fromkeys(text for text in said if text))
    rows = []
    for line, text in zip(lines.to_dict("records"), said, strict=True):
        mark = f" [{remarks.index(text) + 1}]" if text else ""
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
