"""The parts of the page: a table set out as the paper does, what runs promise, documents, figures."""

import pandas as pd

from groupwise.analysis.report.parts import inline, make_grid, promises, to_html
from groupwise.analysis.table_lines import LINE


def lines(*places: tuple[str, str]) -> pd.DataFrame:
    """Lines of `table_lines` at those rows and columns, none of them measured."""
    empty = dict.fromkeys(LINE, "") | {"n": 0, "expected": 3, "mean": float("nan"), "low": float("nan")}
    return pd.DataFrame(
        [empty | {"row": row, "column": column, "status": "not run", "why": "no GPU"} for row, column in places]
    )


def test_columns_of_one_heading_stand_side_by_side_in_the_order_of_all_rows():
    one = [("base / A", f"ε=8 / {task}") for task in ("MNLI-(m/mm)", "QQP")]
    two = [("base / B", f"ε={budget} / {task}") for budget in (3, 8) for task in ("MNLI-m", "QQP", "SST-2")]
    grid = make_grid(lines(*one, *two))
    assert grid.heads[0] == [("ε=3", 3), ("ε=8", 4)]
    assert [text for text, _ in grid.heads[1][3:]] == ["MNLI-m", "MNLI-(m/mm)", "QQP", "SST-2"]
    group, rows = grid.groups[0]
    assert group == "base" and [label for label, _ in rows] == ["A", "B"]
    assert [box is not None for box in rows[0][1]] == [False] * 4 + [True, True, False]
    assert grid.counts == {"not run": 8} and grid.reasons == ["no GPU (8)"]


def test_one_level_of_columns_is_one_row_of_headings():
    grid = make_grid(lines(("GPT-3 0-shot", "R-1"), ("flat / GPT-2-xl", "R-1")))
    assert grid.heads == [[("R-1", 1)]]
    assert [group for group, _ in grid.groups] == ["", "flat"]


def plan(**given: str) -> dict[str, str]:
    row = {"hash": "a", "cell": "clip=flat task=cifar", "plan.dataset_size": "50000", "plan.delta": "1e-05"}
    row |= {"plan.adjacency": "add_remove", "plan.sampling": "poisson", "plan.accountant": "prv"}
    return row | {"plan.private": "True", "plan.epsilon": "3.0", "plan.spent_epsilon": "2.9991"} | given


def test_runs_of_one_kind_are_one_line_and_each_run_counts_once():
    rows = [plan(), plan(), plan(hash="b", **{"plan.epsilon": "8.0", "plan.spent_epsilon": "7.9982"})]
    (line,) = promises(pd.DataFrame(rows))
    assert line["runs"] == "2" and line["N"] == "50,000" and line["a guarantee"] == "yes"
    assert line["ε spent"] == "2.999 of 3, 7.998 of 8"


def test_a_run_that_promises_nothing_is_not_called_private():
    shuffled = plan(hash="b", **{"plan.sampling": "shuffle", "plan.private": "False"})
    found = promises(pd.DataFrame([plan(), shuffled, {"hash": "c", "cell": "task=e2e"}]))
    assert [line["a guarantee"] for line in found] == ["yes", "no", "no"]  # CIFAR-10, Poisson and shuffled; E2E
    assert {line["ε spent"] for line in found if line["a guarantee"] == "no"} == {"–"}
    assert not any("nan" in text.lower() for line in found for text in line.values())
    assert promises(pd.DataFrame({"hash": ["a"], "cell": ["task=cifar"]})) == []


def test_a_document_becomes_part_of_the_page(tmp_path):
    text = "# Title\n\nSee [there](#two-words) and [that](other.md#x).\n\n| a |\n|---|\n| 1 |\n\n"
    text += "## Two words\n\n<!-- begin -->\nEnd & <b>.\n"
    first, rest = to_html(text, tmp_path / "docs" / "page.md", tmp_path / "results" / "report.html", "doc")
    assert "Title" not in first and 'href="#doc-two-words"' in first and 'href="../docs/other.md#x"' in first
    assert first.rstrip().endswith("</table></div>")
    assert '<h3 id="doc-two-words">' in rest and "begin" not in rest and "End &amp; &lt;b&gt;" in rest


def test_a_figure_has_its_own_ids_and_the_pages_colours():
    svg = b"""<?xml version="1.0"?><!DOCTYPE svg>
    <svg width="360pt" height="72pt" viewBox="0 0 360 72"><metadata>m</metadata>
    <g id="axes_1"><path clip-path="url(#c)" style="stroke: #000000"/><use xlink:href="#m"/></g></svg>"""
    text = str(inline(svg, "one", 'A "title"'))
    assert text.startswith('<svg role="img" aria-label="A &#34;title&#34;"')
    assert 'id="one-axes_1"' in text and "url(#one-c)" in text and 'href="#one-m"' in text
    assert "stroke: currentColor" in text and "metadata" not in text
    assert "--width: 480px; --least: 0px" in text and 'width="360pt"' not in text
