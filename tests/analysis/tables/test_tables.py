"""The lines of tables, their statuses, and the files that are written from them."""

import math
import re
from dataclasses import replace
from importlib import import_module

import pandas as pd
import pytest
import yaml

from groupwise.analysis.results import TABLES, Folders, run_in_words
from groupwise.analysis.statistics import STATUSES, p_beyond, summarise
from groupwise.analysis.table_lines import table_lines
from groupwise.analysis.tables import COMMON, ERRATA, PAGES, anchor, grid, main, notes
from groupwise.errors import UserError
from groupwise.rows import between_markers
from tests.analysis.tables.conftest import ROOT, made_up

PROJECT = Folders.of_checkout()


def near_paper(cell, seed):
    """The paper's values of fixed_per_layer, 0.5 too good; flat clipping on SST-2 is two points too good."""
    paper = {
        ("cifar", "fixed_layer"): (60.6, 67.8),
        ("cifar", "flat"): (63.1, 73.9),
        ("sst2", "fixed_layer"): (89.4, 89.7),
        ("sst2", "flat"): (92.5, 93.2),
    }[cell["task"], cell["clip"]]
    return paper[cell["privacy.epsilon"] == "8"] + 0.5 + 0.1 * (seed - 1)


def test_without_rows_every_number_is_not_run(world):
    lines = table_lines("fixed_per_layer", world.folders)
    assert set(lines["status"]) == {"not run"}
    assert set(lines["scale"]) == {""} and set(lines["n"]) == {0} and set(lines["expected"]) == {3}
    assert lines["why"].str.contains("on a GPU; scale=mini was not run yet").all()


def test_reduced_rows_are_never_a_reproduction(world):
    world.write(world.rows("fixed_per_layer", value=near_paper), "fixed_per_layer")
    lines = table_lines("fixed_per_layer", world.folders)
    assert set(lines["status"]) == {"reduced only"}
    first = lines.iloc[0]
    assert (first["mean"], first["n"], first["std"]) == (pytest.approx(61.1), 3, pytest.approx(0.1))
    assert first["high"] - first["mean"] == pytest.approx(4.30265 * 0.1 / math.sqrt(3), rel=1e-5)
    assert all(len(text) == 12 for text in first["hashes"].split()) and first["commits"] == "0123456"


def test_rows_at_paper_scale_are_compared_and_come_first(world):
    world.write(world.rows("fixed_per_layer"), "fixed_per_layer")
    rows = world.rows("fixed_per_layer", "paper", near_paper)
    world.write(
        rows[rows["cell"] != "clip=flat privacy.epsilon=3 task=cifar"].drop(index=6), "fixed_per_layer", "paper"
    )
    lines = table_lines("fixed_per_layer", world.folders)
    places, cifar = ["row", "column"], lines["row"].str.startswith("CIFAR-10")
    assert lines[cifar]["scale"].tolist() == ["paper"] * 3 + ["mini"] * 4  # one cell was only run at mini
    assert lines[~cifar]["scale"].tolist() == ["paper"] * 4 + ["mini"] * 4
    lines = lines.drop_duplicates(places).set_index(places)
    status = lines["status"]
    assert status["CIFAR-10 / WRN16-4 / Fixed per-layer", "ε=3"] == "incomplete"
    assert status["CIFAR-10 / WRN16-4 / Fixed per-layer", "ε=8"] == "reproduced"
    assert status["CIFAR-10 / WRN16-4 / Fixed flat", "ε=3"] == "reduced only"
    differs = lines.loc[("SST-2 / RoBERTa-base / Fixed flat", "ε=3")]
    assert differs["status"] == "differs"
    assert differs["why"] == "by +2.00 points; the 95 % interval of our mean does not contain the paper's"


def test_gain_is_the_mean_of_paired_differences(world):
    rows = world.rows("adaptivity")
    gone = (rows["cell"] == "clip=fixed_layer privacy.epsilon=3 task=cifar") & (rows["seed"] == 2)
    world.write(rows[~gone], "adaptivity")
    lines = table_lines("adaptivity", world.folders).set_index(["row", "column"])
    complete = lines.loc[("CIFAR-10 / Per-layer clipping / gain", "ε=8")]
    assert (complete["mean"], complete["n"], complete["printed"]) == (pytest.approx(4.0), 3, "5.7")
    part = lines.loc[("CIFAR-10 / Per-layer clipping / gain", "ε=3")]
    assert (part["n"], part["flags"]) == (2, "2 of 3 seeds, without 2")
    assert len(part["hashes"].split()) == 4


def test_literature_is_quoted_and_omitted_cells_have_a_reason(world):
    world.write(world.rows("glue"), "glue")
    lines = table_lines("glue", world.folders)
    assert lines["status"].value_counts().to_dict() == {"quoted": 36, "not run": 16, "reduced only": 4}
    why = lines.set_index(["row", "column"])["why"]
    assert "its training data were not available" in why["RoBERTa-base / Adaptive per-layer", "ε=3 / MNLI-mm"]
    assert "replaces RoBERTa-base only" in why["RoBERTa-large / Adaptive per-layer", "ε=8 / QNLI"]
    assert set(lines["status"]) <= set(STATUSES)


def test_line_that_does_not_select_one_cell_is_refused(world):
    path = world.folders.sweeps / "fixed_per_layer.yaml"
    path.write_text(path.read_text().replace("task: cifar", "task: digits"))
    with pytest.raises(UserError, match="selects 0 cells of the sweep fixed_per_layer, not one"):
        table_lines("fixed_per_layer", world.folders)
    path.unlink()
    with pytest.raises(UserError, match="no sweep fixed_per_layer"):
        table_lines("fixed_per_layer", world.folders)


@pytest.mark.parametrize("name", TABLES)
def test_every_line_selects_a_cell_of_its_sweep(name, tmp_path):
    lines = table_lines(name, replace(PROJECT, measured=tmp_path))
    assert set(lines["status"]) <= {"not run", "quoted"}


def test_notes_state_delta_adjacency_sampler_and_provenance(world):
    rows = world.rows("fixed_per_layer")
    rows.loc[[3, 4, 5], "plan.private"] = False
    rows.loc[3, "plan.noise_multiplier"], rows["data.public"] = 0.0, rows.index.isin([3, 4, 5])
    world.write(rows.drop(index=11), "fixed_per_layer")
    under = "\n".join(notes("fixed_per_layer", world.folders, table_lines("fixed_per_layer", world.folders)))
    assert (
        "Privacy of 22 of 23 runs: δ = 1e-05; for adding or removing one training example; Poisson sampling; PRV."
        in under
    )
    assert "1 of 23 runs have no guarantee" in under and "secret keys; in 2 of 23 runs, on public data, the" in under
    assert "23 runs; commits 0123456; on cpu (made up); torch 2.13.0." in under
    assert "Reduced numbers are no reproduction" in under
    assert "Flag: CIFAR-10 / WRN16-4 / Fixed per-layer, ε=8: 2 of 3 seeds, without 2." in under


@pytest.mark.parametrize("name", PAGES)
def test_committed_page_is_up_to_date(name):
    made, prose = import_module(f"groupwise.analysis.{PAGES[name]}").page(PROJECT), ROOT / "docs" / f"{name}.md"
    text, again = prose.read_text() if prose.is_file() else "", f"run python -m groupwise.analysis.tables {name}"
    assert set(re.findall(r"<!-- begin (\w+)", text)) == set(made.parts)
    for marker, part in made.parts.items():
        assert between_markers(text, marker, part, prose) == text, again
    assert made.text == (ROOT / "results" / "tables" / f"{name}.md").read_text(), again


def test_errata_are_headings_of_the_page():
    text = (ROOT / "docs" / "errata.md").read_text()
    for name in ERRATA:
        for heading in (*COMMON, *ERRATA[name]):
            assert f"\n## {heading}\n" in text
            assert f"(#{anchor(heading)})" in text or heading == "Smaller choices"


def test_files_do_not_depend_on_the_order_of_rows(world, tmp_path):
    names = ["fixed_per_layer", "adaptivity", "glue", "hyperparameters_glue"]
    for folder, seed in (("one", 0), ("two", 1)):
        for name in names[:3]:
            world.write(world.rows(name).sample(frac=1, random_state=seed), name)
        assert main([*names, "--out", str(tmp_path / folder)], world.folders) == 0
    one, two = (sorted((tmp_path / folder).iterdir()) for folder in ("one", "two"))
    assert [path.name for path in one] == [path.name for path in two] and len(one) == 11
    assert all(a.read_bytes() == b.read_bytes() for a, b in zip(one, two, strict=True))


def test_markdown_and_latex_have_every_number(world, tmp_path):
    world.write(world.rows("adaptivity"), "adaptivity")
    assert main(["adaptivity", "--out", str(tmp_path)], world.folders) == 0
    assert main(["adaptivity", "--out", str(tmp_path / "adaptivity.md")], world.folders) == 2  # a file, no folder
    page, latex = (tmp_path / "adaptivity.md").read_text(), (tmp_path / "adaptivity.tex").read_text()
    assert page.startswith("# Table 0: adaptivity.\n")
    assert "\\caption{The paper's Table 0 (reduced, no reproduction): adaptivity.}" in latex
    assert "| CIFAR-10 / Per-layer clipping / adaptive (mini) | 63.7 (0.34) / 60.08 (0.30) mini [1] | 73.5 " in page
    assert "\n[1] reduced only; 3 of 3 seeds; scale=mini; scale=paper needs WRN16-4" in page
    assert "CIFAR-10 / Per-layer clipping / adaptive (mini) & 63.7 (0.34) / 60.08 (0.30) mini [1] & 73.5 " in latex
    assert " & $\\varepsilon$=3 & $\\varepsilon$=8 \\\\" in latex
    for rule in ("\\toprule", "\\midrule", "\\bottomrule"):
        assert rule in latex
    assert len(re.findall(r"&.*\\\\$", latex, re.MULTILINE)) == 13
    assert latex.count("{") == latex.count("}")


def test_columns_only_from_literature_come_last(world):
    table, _ = grid(table_lines("glue", world.folders))
    assert next(iter(table)) == "ε=3 / MNLI-m" and list(table)[-1] == "ε=8 / MNLI-(m/mm)"
    assert table.loc["RoBERTa-base / Adaptive per-layer", "ε=8 / MNLI-(m/mm)"] == "–"


def test_summary_of_few_numbers_has_no_interval():
    assert summarise([]).n == 0 and math.isnan(summarise([]).mean)
    one = summarise([2.0])
    assert (one.mean, one.n) == (2.0, 1) and math.isnan(one.std) and math.isnan(one.low)
    assert all(math.isnan(p_beyond(summarise(values), 0.0, above=True)) for values in ([1.0], [1.0, 1.0]))
    assert p_beyond(summarise([1.0, 2.0, 3.0]), 0.0, above=True) == pytest.approx(0.0742 / 2, abs=1e-4)


@pytest.fixture
def two_scales(world) -> pd.DataFrame:
    """The lines of adaptivity: all cells at mini, and all except fixed_layer also at midi."""
    path = world.folders.sweeps / "adaptivity.yaml"
    content = yaml.safe_load(path.read_text())
    content["scales"]["midi"] = {"clip": {"fixed_layer": None}}
    path.write_text("# The title of adaptivity.\n" + yaml.safe_dump(content))
    world.write(world.rows("adaptivity"), "adaptivity")
    world.write(world.rows("adaptivity", "midi", lambda cell, seed: made_up(cell, seed) + 10), "adaptivity", "midi")
    return table_lines("adaptivity", world.folders)


def test_two_reduced_scales_of_a_block_are_both_shown(world, two_scales):
    for block in ("CIFAR-10", "SST-2"):
        own = two_scales[two_scales["row"].str.startswith(block)]
        counts = own["scale"].value_counts(sort=False).to_dict()
        assert list(counts) == ["midi", "mini"] and counts["mini"] == 12 > counts["midi"]
    midi = two_scales[two_scales["scale"] == "midi"]
    assert not midi["cell"].str.contains("fixed_layer").any()
    assert set(two_scales["status"]) == {"reduced only"}
    first = notes("adaptivity", world.folders, two_scales)[0]
    assert "scale=midi: real data" in first and "scale=mini: " in first


def test_row_has_one_scale_and_a_gain_is_a_difference_within_its_block(two_scales):
    table, _ = grid(two_scales)
    assert "70.08" in table.loc["CIFAR-10 / Per-layer clipping / adaptive (midi)", "ε=3"]
    assert "60.08" in table.loc["CIFAR-10 / Per-layer clipping / adaptive (mini)", "ε=3"]
    mini = two_scales[two_scales["scale"] == "mini"].set_index(["row", "column"])["mean"]
    for group in ("CIFAR-10 / Flat clipping", "SST-2 / Per-layer clipping"):
        difference = mini[f"{group} / adaptive", "ε=8"] - mini[f"{group} / fixed", "ε=8"]
        assert mini[f"{group} / gain", "ε=8"] == pytest.approx(difference)


def test_cell_names_its_model_and_training_or_is_not_learned(world):
    rows = world.rows("fixed_per_layer")
    sst2 = rows["cell"].str.contains("sst2")
    rows = rows.assign(**{"model.name": "roberta_tiny", "model.depth": 10, "model.width": 1, "train.epochs": 2.0})
    rows = rows.assign(**{"plan.steps": 1200, "valid/accuracy": rows["valid/accuracy"].mask(sst2, 51.0)})
    rows.loc[~sst2, "model.name"] = "wide_resnet"
    world.write(rows, "fixed_per_layer")
    table, remarks = grid(table_lines("fixed_per_layer", world.folders))
    assert table.loc["SST-2 / RoBERTa-base / Fixed per-layer (mini)", "ε=3"].startswith("89.4 / not learned mini [")
    assert any("ours: roberta_tiny, epochs 2, steps 1,200" in text for text in remarks)
    assert any("ours: WRN10-1, epochs 2, steps 1,200, on cpu (made up)" in text for text in remarks)
    row = rows[sst2].iloc[0].to_dict() | {"cell": "model.trains=attention", "model.trains": "all"}
    assert run_in_words(row) == "roberta_tiny, model.trains=all, epochs 2, steps 1,200, on cpu (made up)"


def test_cells_that_are_not_in_the_paper_are_not_compared(world):
    world.write(world.rows("adaptivity", "paper"), "adaptivity", "paper")
    lines = table_lines("adaptivity", world.folders)
    odd = lines[lines["status"] == "not in the paper"]
    assert set(odd["row"]) == {"CIFAR-10 / Flat clipping / adaptive", "CIFAR-10 / Flat clipping / gain"}
