"""Makes one page of all tables, figures and findings:  python -m groupwise.analysis.report [--out results/report.html]

The page is built from the output of `make tables` and `make figures`. It needs neither a network nor other files.
"""

import argparse
import base64
import html
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import pandas as pd
from markdown_it import MarkdownIt

from groupwise.analysis.figures import FIGURES
from groupwise.analysis.results import HYPERPARAMETERS, TABLES
from groupwise.atomic import write_text
from groupwise.errors import UserError, command

STYLE = """
:root { color-scheme: light dark; }
body { max-width: 72rem; margin: 0 auto; padding: 1rem; font: 1rem/1.5 system-ui, sans-serif; }
table { display: block; overflow-x: auto; border-collapse: collapse; }
table { font-size: .9rem; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .6rem; text-align: left; vertical-align: top; border-bottom: 1px solid #8888; }
code { overflow-wrap: anywhere; }
img { display: block; max-width: 100%; width: 45rem; }
"""
OTHER_PAGES = ("findings", "coverage", "searches", "benchmarks")
"""The pages of results/tables that are not a table of the paper."""


def render(results: Path, out: Path) -> str:
    """The page for the file `out`; raises `UserError` if a table is missing. The same inputs give the same page."""
    pages = {name: results / "tables" / f"{name}.md" for name in (*TABLES, *OTHER_PAGES, *HYPERPARAMETERS)}
    if missing := next((path for path in pages.values() if not path.is_file()), None):
        raise UserError(f"There is no {missing}: make it with make tables figures.")
    summary = results.parent / "docs" / "findings.md"
    parts = {"summary": _text(summary, out)} if summary.is_file() else {}
    parts |= {name: _text(pages[name], out) + _samples(results, name) for name in TABLES}
    parts |= {name: _figure(path) for name in FIGURES if (path := results / "figures" / f"{name}.png").is_file()}
    parts |= {name: _text(pages[name], out) for name in (*OTHER_PAGES, *HYPERPARAMETERS)}
    links = "\n".join(f'<a href="#{name}">{name.replace("_", " ")}</a>' for name in parts)
    sections = "\n".join(f'<section id="{name}">\n{content}</section>' for name, content in parts.items())
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>groupwise: the paper's tables and figures, measured</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
        f"<h1>Group-wise clipping, measured</h1>\n<nav>\n{links}\n</nav>\n{sections}\n</body>\n</html>\n"
    )


def _text(page: Path, out: Path) -> str:
    """A page in Markdown as HTML, with headings one level lower and links relative to `out`."""

    def link(target: re.Match[str]) -> str:
        return Path(os.path.relpath(page.parent / target[0], out.parent)).as_posix()

    text = re.sub(r"<!--.*?-->\n?", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    written = MarkdownIt("commonmark", {"html": False}).enable("table").render(text)
    written = re.sub(r'(?<=href=")(?![a-z]+:|#)[^"#]+', link, written)
    return re.sub(r"<(/?)h([1-5])>", lambda tag: f"<{tag[1]}h{int(tag[2]) + 1}>", written)


def _samples(results: Path, name: str) -> str:
    """The texts that the first seed of each cell generated for a few test inputs."""
    written = ""
    for path in sorted((results / "measured").glob(f"{name}_*_texts.csv")):
        rows = pd.read_csv(path, dtype=str, keep_default_na=False).drop_duplicates(["cell", "source"])
        shown = rows.set_index(["source", "reference", "cell"])[["output"]].sort_index(kind="stable")
        table = shown.to_html(border=0, index_names=False)
        written += f"<details><summary>Generated texts, {html.escape(path.stem)}</summary>\n{table}\n</details>\n"
    return written


def _figure(path: Path) -> str:
    image = base64.b64encode(path.read_bytes()).decode()
    title, caption = html.escape(path.with_suffix(".txt").read_text(encoding="utf-8")).splitlines()
    return f'<h2>{title}</h2>\n<img alt="{title}" src="data:image/png;base64,{image}">\n<p>{caption}</p>\n'


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m groupwise.analysis.report", description=__doc__)
    parser.add_argument("--results", type=Path, default=Path("results"), help="the folder of tables/ and figures/")
    parser.add_argument("--out", type=Path, default=Path("results/report.html"))
    given = parser.parse_args(arguments)
    page = render(given.results, given.out)
    given.out.parent.mkdir(parents=True, exist_ok=True)
    write_text(given.out, page)
    print(f"{given.out}: {len(page.encode()) / 1e6:.2f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
