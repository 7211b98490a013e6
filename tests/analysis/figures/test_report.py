"""The page: whole, self-contained, true to its rows, and sane for keyboards, screen readers and both colour schemes."""

import re
from html.parser import HTMLParser
from pathlib import Path

import pandas as pd
import pytest

from groupwise.analysis.figures import KINDS
from groupwise.analysis.report.__main__ import LIGHT, main, render
from groupwise.analysis.results import Folders
from groupwise.rows import Table, write_table

ROOT = Path(__file__).resolve().parents[3]
FOLDERS = Folders(ROOT / "results" / "paper", ROOT / "results" / "measured", ROOT / "sweeps")
VOID = {"meta", "link", "br", "hr", "img", "input", "path", "use", "image", "rect", "circle", "stop"}


class Page(HTMLParser):
    """What a page has: ids, links, headings and whether its tags close."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.headings: list[int] = []
        self.tags: list[str] = []
        self.unbalanced: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        self.unbalanced += self._open

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        self.tags.append(tag)
        self.ids += [given["id"]] if given.get("id") else []
        self.links += [given["href"]] if tag == "a" else []
        self.loaded += [given[key] for key in ("src", "srcset", "xlink:href", "data") if given.get(key)]
        self.headings += [int(tag[1])] if re.fullmatch("h[1-6]", tag) else []
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        if tag not in VOID:
            self._open.pop()

    def handle_endtag(self, tag):
        if tag in VOID:
            return
        if not self._open or self._open.pop() != tag:
            self.unbalanced.append(tag)


@pytest.fixture
def tables_only(report_folders):
    """Rows of tables and none of figures, which take longer."""
    for name in KINDS:
        for path in report_folders.measured.glob(f"{name}_mini*.csv"):
            path.unlink()
    return report_folders


@pytest.fixture
def page(rendered):
    return rendered[:2]


def test_it_needs_nothing_else(page):
    text, _ = page
    parsed = Page(text)
    assert len(text.encode()) < LIGHT
    assert not {"script", "link", "iframe", "img"} & set(parsed.tags)
    assert all(place.startswith(("#", "data:")) for place in parsed.loaded)
    assert not re.search(r"@import|url\((?!#)", text)


def test_its_html_is_sane(page):
    parsed = Page(page[0])
    assert parsed.unbalanced == []
    assert len(parsed.ids) == len(set(parsed.ids))
    inside = [link[1:] for link in parsed.links if link.startswith("#")]
    assert set(inside) <= set(parsed.ids)
    assert parsed.headings[0] == 1 and parsed.headings.count(1) == 1
    steps = zip(parsed.headings, parsed.headings[1:], strict=False)
    assert all(after - before <= 1 for before, after in steps)
    assert page[0].count("<svg") == page[0].count('<svg role="img" aria-label="')


def test_it_says_what_is_reduced_and_what_is_missing(page):
    text, left_out = page
    assert "<b>none\nis reproduced at the paper's scale</b>".replace("\n", " ") in " ".join(text.split())
    assert set(left_out) >= {"adaptivity", "samsum", "throughput", "runtime_breakdown"}
    assert "Not counted" in text  # the tables without a sweep
    assert "make bench" in text  # how to get the rows of a figure that has none
    assert text.count("Reduced, no reproduction") == 7


def test_a_number_shows_its_seeds_cell_code_and_records(rendered):
    text, _, folders = rendered
    row = pd.read_csv(folders.measured / "cifar_mini.csv").iloc[0]
    assert f'<a href="runs/{row["hash"][:12]}/result.json">' in text
    box = text[text.index('<td class="st-reduced-only">') :].split("</td>")[0]
    for words in ("<dt>seeds</dt><dd>3 of 3</dd>", "<dt>95 % interval</dt>", "<dt>cell</dt>", "<code>0123456</code>"):
        assert words in box


def test_texts_stand_below_their_table(tables_only):
    first = {
        "sweep": "glue",
        "scale": "mini",
        "hash": "1",
        "input": "0",
        "source": "name : A<b>",
        "reference": "A it is.",
    }
    rows = [{**first, "cell": cell, "seed": seed, "output": f"{cell} wrote {seed}"} for cell in "xy" for seed in "01"]
    write_table(tables_only.measured / "glue_mini_texts.csv", Table(rows))
    text, _ = render(tables_only, ROOT / "docs", tables_only.measured.parent / "report.html")
    part = text[text.index("What was written for inputs") :].split("</details>")[0]
    assert "name : A&lt;b&gt;" in part and "A it is." in part
    assert "x wrote 0" in part and "y wrote 0" in part and "wrote 1" not in part


def test_privacy_errata_findings_and_settings_are_there(page):
    text = page[0]
    assert "adding or removing one training example" in text and "7.998 of 8" in text and "<td>1e-05</td>" in text
    assert 'id="errata-counts-are-centred"' in text and 'href="#errata-counts-are-centred"' in text
    assert "Settings for WRN16-4 on CIFAR-10" in text
    assert 'href="../../' not in text.split("<svg")[0]  # links start at the page, not at docs/


def test_missing_seeds_are_flagged(tables_only, tmp_path):
    path = tables_only.measured / "cifar_mini.csv"
    pd.read_csv(path).iloc[1:].to_csv(path, index=False)
    text, _ = render(tables_only, ROOT / "docs", tmp_path / "results" / "report.html")
    assert "2 of 3 seeds" in text


def test_rows_at_fault_are_shown_as_such_and_nothing_else_of_them(tables_only, tmp_path):
    path = tables_only.measured / "cifar_mini.csv"
    frame = pd.read_csv(path)
    frame["valid/accuracy"] = frame["valid/accuracy"].astype(object)
    frame.loc[0, "valid/accuracy"] = "forty"
    frame.to_csv(path, index=False)
    text, left_out = render(tables_only, ROOT / "docs", tmp_path / "results" / "report.html")
    assert "no finite number" in left_out["cifar"] and "no finite number" in text
    table = text[text.index('<article id="table-cifar"') :].split("</article>")[0]
    assert "<table" not in table


def test_a_reproduced_number_and_one_that_differs_are_told_apart(tables_only, tmp_path):
    paper = pd.read_csv(tables_only.paper / "cifar.csv")
    path = tables_only.measured / "cifar_mini.csv"
    frame = pd.read_csv(path).assign(scale="paper")
    for line in paper.to_dict("records"):
        same = frame["cell"] == " ".join(sorted(line["cell"].split()))
        frame.loc[same, line["metric"]] = line["value"] + (0.1 if "clip=flat" in line["cell"] else 5.0)
    path.unlink()
    frame.to_csv(tables_only.measured / "cifar_paper.csv", index=False)
    text, _ = render(tables_only, ROOT / "docs", tmp_path / "results" / "report.html")
    table = text[text.index('<article id="table-cifar"') :].split("</article>")[0]
    assert table.count('<td class="st-reproduced">') == 8 and table.count('<td class="st-differs">') == 8
    assert "✓" in table and "≠" in table
    assert "<b>8 are reproduced" in " ".join(text.split())


@pytest.mark.slow
def test_the_command_writes_the_same_page_each_time(report_folders, tmp_path, capsys):
    given = [
        *("--paper", str(report_folders.paper), "--measured", str(report_folders.measured)),
        *("--sweeps", str(report_folders.sweeps), "--docs", str(ROOT / "docs")),
        *("--out", str(tmp_path / "results" / "report.html")),
    ]
    assert main(given) == 0
    before = (tmp_path / "results" / "report.html").read_bytes()
    printed = capsys.readouterr()
    assert "MB" in printed.out and "left out: throughput" in printed.err
    assert main(given) == 0
    assert (tmp_path / "results" / "report.html").read_bytes() == before


def test_without_any_rows_there_is_still_a_page(tables_only, tmp_path):
    for path in tables_only.measured.iterdir():
        path.unlink()
    text, _ = render(tables_only, ROOT / "docs", tmp_path / "results" / "report.html")
    assert Page(text).unbalanced == [] and "There are no rows of target_quantile" in text


def test_links_out_of_the_page_lead_somewhere(rendered):
    text, _, folders = rendered
    made = ("runs/", "figures/", "tables/", "measured/")  # by other commands
    outside = [link.split("#")[0] for link in Page(text).links if not link.startswith(("#", "http", *made))]
    assert outside
    for link in outside:
        assert (folders.measured.parent / link).exists(), link
