"""The HTML report contains all tables and figures, needs no other file, and has no broken links."""

import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import pandas as pd
import pytest

from groupwise.analysis.figures import FIGURES
from groupwise.analysis.report import main, render
from groupwise.analysis.results import HYPERPARAMETERS, TABLES

ROOT = Path(__file__).resolve().parents[3]
VOID = {"meta", "br", "hr", "img"}


class Page(HTMLParser):
    """The ids, links and images of a page, and its unbalanced tags."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.links: list[str] = []
        self.images: list[str] = []
        self.unbalanced: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        self.unbalanced += self._open

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        self.ids += [given["id"]] if "id" in given else []
        self.links += [given["href"]] if tag == "a" else []
        self.images += [given["src"]] if tag == "img" else []
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag):
        if tag not in VOID and (not self._open or self._open.pop() != tag):
            self.unbalanced.append(tag)


@pytest.fixture(scope="module")
def text() -> str:
    return render(ROOT / "results", ROOT / "results" / "report.html")


@pytest.fixture
def results(tmp_path) -> Path:
    """A copy of the committed tables, without figures."""
    shutil.copytree(ROOT / "results" / "tables", tmp_path / "results" / "tables")
    return tmp_path / "results"


def test_report_is_complete_and_self_contained(text):
    page = Page(text)
    assert page.unbalanced == []
    assert set(page.ids) >= {*TABLES, *FIGURES, *HYPERPARAMETERS, "summary", "findings", "coverage"}
    assert len(page.ids) == len(set(page.ids))
    assert len(page.images) >= len(FIGURES) and all(image.startswith("data:image/png") for image in page.images[-9:])
    assert not re.search(r"@import|url\(|<script|<link", text)
    assert len(text.encode()) < 3_000_000


def test_links_are_not_broken(text):
    for link in Page(text).links:
        inside, outside = link[1:] if link.startswith("#") else None, link.split("#")[0]
        assert inside in Page(text).ids if inside else link.startswith("http") or (ROOT / "results" / outside).exists()


def test_table_has_the_layout_of_the_paper(text):
    section = text[text.index('<section id="cifar">') :].split("</section>")[0]
    lines = pd.read_csv(ROOT / "results" / "tables" / "cifar.csv")
    first = lines.iloc[0]
    assert f"<td>{first['printed']} / {first['mean']:.2f} ({first['std']:.2f}) {first['scale']} [1]</td>" in section
    assert section.count(f"<td>{first['row']} ({first['scale']})</td>") == 1
    assert "[1] reduced only; 3 of 3 seeds" in section


def test_texts_are_shown_below_their_table(results):
    (results / "measured").mkdir()
    first = {"input": "0", "source": "name : A<b>", "reference": "A it is."}
    rows = [{**first, "cell": cell, "seed": seed, "output": f"{cell} wrote {seed}"} for cell in "xy" for seed in "01"]
    pd.DataFrame(rows).to_csv(results / "measured" / "glue_mini_texts.csv", index=False)
    part = render(results, results / "report.html").split("<details>")[1].split("</details>")[0]
    assert "name : A&lt;b&gt;" in part and "A it is." in part
    assert "x wrote 0" in part and "y wrote 0" in part and "wrote 1" not in part


def test_command_writes_the_same_page_twice(results, capsys):
    given = ["--results", str(results), "--out", str(results / "report.html")]
    pages = []
    for _ in range(2):
        assert main(given) == 0
        pages.append((results / "report.html").read_bytes())
    assert pages[0] == pages[1] and "MB" in capsys.readouterr().out
    (results / "tables" / "cifar.md").unlink()
    assert main(given) == 2
    assert "make tables" in capsys.readouterr().err
