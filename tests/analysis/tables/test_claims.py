"""Claims are judged by paired differences and their intervals; reduced, missing and useless rows say so."""

import math
from pathlib import Path

import pytest

from groupwise.analysis.findings import (
    AGREEMENT,
    ALIKE,
    CLAIMS,
    DISAGREEMENT,
    LESS,
    MORE,
    NO_WORSE,
    UNDECIDED,
    Claim,
    decide,
    fill,
    full,
    judge,
    main,
    summary,
    verdicts,
)
from groupwise.analysis.paper import Folders, settings_of
from groupwise.analysis.statistics import Contrast, differences, summarise
from groupwise.errors import UserError
from groupwise.sweeps.cells import read_sweep

SWEEPS = Path(__file__).resolve().parents[3] / "sweeps"
CIFAR = {"task": "cifar"}
PAGE = "# Title\n<!-- begin summary: x -->\nstale\n<!-- end summary -->\nprose\n"


def claim(kind: str, plus=("fixed_layer",), minus=("flat",), sweep="adaptivity") -> Claim:
    terms = [tuple({"clip": name} for name in names) for names in (plus, minus)]
    return Claim("It is so", "CIFAR-10", Contrast(sweep, *terms, CIFAR), kind)


def test_differences_are_paired_over_all_else():
    contrast = Contrast("any", ({"clip": "a"},), ({"clip": "b"},), CIFAR)
    values = {
        ("clip=a privacy.epsilon=3 task=cifar", 0): 1.0,
        ("clip=b privacy.epsilon=3 task=cifar", 0): 3.0,
        ("clip=a privacy.epsilon=8 task=cifar", 0): 5.0,  # its partner is of another seed
        ("clip=b privacy.epsilon=8 task=cifar", 1): 5.0,
        ("clip=a privacy.epsilon=3 task=sst2", 0): 9.0,  # another task
        ("clip=c privacy.epsilon=3 task=cifar", 0): 9.0,  # neither a nor b
    }
    found = differences(contrast, values)
    assert found.differences == [-2.0] and found.unpaired == 2 and found.means == [1.0, 3.0]
    assert differences(contrast, {}).differences == []


def test_a_difference_of_differences():
    contrast = Contrast("any", ({"clip": "a"}, {"clip": "d"}), ({"clip": "b"}, {"clip": "c"}))
    values = {(f"clip={name} x=1", 0): value for name, value in {"a": 7.0, "b": 4.0, "c": 5.0, "d": 4.5}.items()}
    assert differences(contrast, values).differences == [2.5]


@pytest.mark.parametrize(
    ("kind", "values", "word"),
    [
        (LESS, [-2.0, -2.1, -1.9], AGREEMENT),
        (LESS, [2.0, 2.1, 1.9], DISAGREEMENT),
        (LESS, [-2.0, 2.0, -1.0], UNDECIDED),
        (MORE, [2.0, 2.1, 1.9], AGREEMENT),
        (MORE, [-2.0, -2.1, -1.9], DISAGREEMENT),
        (ALIKE, [0.1, 0.0, -0.1], AGREEMENT),
        (ALIKE, [2.0, 2.1, 1.9], DISAGREEMENT),
        (ALIKE, [-2.0, -2.1, -1.9], DISAGREEMENT),
        (ALIKE, [0.9, 1.0, 1.1], UNDECIDED),
        (NO_WORSE, [3.0, 3.1, 2.9], AGREEMENT),
        (NO_WORSE, [-0.2, -0.1, 0.0], AGREEMENT),
        (NO_WORSE, [-3.0, -3.1, -2.9], DISAGREEMENT),
    ],
)
def test_the_whole_interval_decides(kind, values, word):
    assert decide(claim(kind), summarise(values), best=60.0)[0] == word


def test_what_cannot_be_decided():
    alike = claim(ALIKE)
    assert decide(alike, summarise([0.0]), best=60.0) == (UNDECIDED, "one pair")
    assert decide(alike, summarise([0.0, 0.0, 0.0]), best=60.0) == (UNDECIDED, "all pairs differ by the same")
    word, why = decide(alike, summarise([0.1, 0.0, -0.1]), best=12.0)
    assert word == UNDECIDED and "hardly learn: 12.0 % at best, 10 % by guessing" in why


def test_made_up_rows_are_judged(world):
    world.write(world.rows("adaptivity"), "adaptivity")
    (loses,) = judge(claim(LESS), world.folders)
    assert (loses.word, loses.scale, loses.measured.n) == (AGREEMENT, "mini", 6)
    assert loses.measured.mean == pytest.approx(-3.91667, abs=1e-4)
    assert loses.paper == pytest.approx((60.6 - 63.1 + 67.8 - 73.9) / 2)
    assert loses.p < 1e-3
    (recovers,) = judge(claim(ALIKE, ("adaptive_layer",)), world.folders)
    assert recovers.word == AGREEMENT


def test_scales_are_judged_apart_and_nothing_is_a_pair(world):
    world.write(world.rows("adaptivity"), "adaptivity")
    rows = world.rows("adaptivity", "paper")
    world.write(rows[rows["seed"] == 0], "adaptivity", "paper")
    assert [verdict.scale for verdict in judge(claim(LESS), world.folders)] == ["paper", "mini"]
    world.write(rows[rows["cell"].str.contains("clip=flat")], "adaptivity", "paper")
    world.write(world.rows("adaptivity")[lambda table: table["seed"] != 1], "adaptivity")
    (verdict,) = judge(claim(LESS), world.folders)
    assert (verdict.scale, verdict.measured.n) == ("mini", 4)


def test_a_run_without_a_partner_is_left_out_and_said(world):
    rows = world.rows("adaptivity")
    gone = (rows["cell"] == "clip=flat privacy.epsilon=3 task=cifar") & (rows["seed"] == 0)
    world.write(rows[~gone], "adaptivity")
    (verdict,) = judge(claim(LESS), world.folders)
    assert verdict.measured.n == 5 and verdict.why == "1 runs without a partner left out"


def test_no_rows_is_not_enough_evidence(world):
    (verdict,) = judge(claim(LESS), world.folders)
    assert (verdict.word, verdict.scale, verdict.why) == (UNDECIDED, "", "no pairs of runs")
    assert summary([verdict]) == "Nothing was measured yet."
    assert math.isnan(verdict.p)


def test_rows_at_fault_stop_the_page(world, tmp_path, capsys):
    world.write(world.rows("fixed_per_layer").assign(scale="paper"), "fixed_per_layer")
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    out = tmp_path / "tables"
    assert main(["--page", str(page), "--out", str(out), *world.options()]) == 2
    assert "in the file of scale=mini" in capsys.readouterr().err
    assert page.read_text() == PAGE and not out.exists()
    assert main(["--page", str(tmp_path / "none.md")]) == 2


def test_the_page_keeps_its_prose_and_is_the_same_twice(world, tmp_path):
    world.write(world.rows("adaptivity"), "adaptivity")
    found = [*judge(claim(LESS), world.folders), *judge(claim(MORE), world.folders)]
    once = fill(PAGE, tmp_path, found)
    assert once.count("prose\n") == 1 and "stale" not in once
    assert "Verdicts at scale=mini (reduced): 1 agreement, 1 disagreement." in once
    assert "| It is so | CIFAR-10 | mini | −4.30 | −3.92 |" in full(found)
    assert fill(once, tmp_path, found) == once
    with pytest.raises(UserError, match="begin summary"):
        fill(PAGE.replace("begin summary", "begin nothing"), tmp_path, found)


def test_every_claim_of_the_project_selects_cells():
    for one in CLAIMS:
        names = [cell.name for cell in read_sweep(SWEEPS / f"{one.contrast.sweep}.yaml").cells("paper")]
        for _, settings in one.contrast.terms:
            wanted = (one.contrast.where | settings).items()
            assert any(wanted <= settings_of(name).items() for name in names), one


def test_the_projects_page_shows_what_its_rows_hold():
    page = SWEEPS.parent / "docs" / "findings.md"
    root = SWEEPS.parent / "results"
    found = verdicts(Folders(root / "paper", root / "measured", SWEEPS))
    assert fill(page.read_text(), page, found) == page.read_text(), "run python -m groupwise.analysis.findings"
    assert full(found) == (root / "tables" / "findings.md").read_text(), "run python -m groupwise.analysis.findings"
