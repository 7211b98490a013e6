"""Every cell of every sweep is listed, with what became of it."""

from pathlib import Path

import pytest
import yaml

from groupwise.analysis import coverage as module
from groupwise.analysis.coverage import coverage, machines, main, page
from groupwise.analysis.paper import Folders

ROOT = Path(__file__).resolve().parents[3]


def only(monkeypatch, world):
    """Two tables, one figure of rows and one of norms."""
    monkeypatch.setattr(module, "TABLES", ("fixed_per_layer", "adaptivity"))
    monkeypatch.setattr(module, "FIGURES", {"quantile_budget": "", "gradnorm_cifar": "_norms"})
    grids = {
        "quantile_budget": {"task": "cifar", "clip": "adaptive_layer", "clip.quantile_budget": [0.01, 0.1]},
        "gradnorm_cifar": {"task": "cifar", "clip": "adaptive_layer"},
    }
    for name, grid in grids.items():
        content = {
            "hydra": {"sweeper": {"grids": [grid | {"privacy.epsilon": 8, "seed": [0]}], "scales": {"mini": {}}}}
        }
        (world.folders.sweeps / f"{name}.yaml").write_text(f"# {name}\n" + yaml.safe_dump(content))


def test_every_cell_has_a_line(world, monkeypatch):
    only(monkeypatch, world)
    lines = coverage(world.folders)
    assert lines["sweep"].value_counts(sort=False).to_dict() == {
        "fixed_per_layer": 8,
        "adaptivity": 16,
        "quantile_budget": 2,
        "gradnorm_cifar": 1,
    }
    assert set(lines["status"]) == {"not run"} and set(lines["paper"]) == {"0 of 3", "0 of 1"}
    assert set(lines["demo"]) == {""}


def test_statuses_follow_the_rows(world, monkeypatch):
    only(monkeypatch, world)
    rows = world.rows("fixed_per_layer", "paper")
    world.write(rows.drop(index=6), "fixed_per_layer", "paper")
    world.write(world.rows("adaptivity"), "adaptivity")
    world.write(world.rows("quantile_budget", "paper").head(1), "quantile_budget", "paper")
    (world.folders.measured / "gradnorm_cifar_mini_norms.csv").write_text(
        "cell,seed,norm\n" + 2 * "clip=adaptive_layer privacy.epsilon=8 task=cifar,0,1.5\n"
    )
    status = coverage(world.folders).set_index(["sweep", "cell"])["status"]
    assert status["fixed_per_layer", "clip=fixed_layer privacy.epsilon=3 task=cifar"] == "incomplete"
    assert status["fixed_per_layer", "clip=flat privacy.epsilon=3 task=cifar"] == "differs"
    assert set(status["adaptivity"]) == {"reduced only"}
    assert status["quantile_budget"].tolist() == ["run in full", "not run"]
    assert status["gradnorm_cifar"].tolist() == ["reduced only"]


def test_the_page_counts_and_is_the_same_twice(world, monkeypatch, tmp_path, capsys):
    only(monkeypatch, world)
    world.write(world.rows("adaptivity"), "adaptivity")
    for folder in ("one", "two"):
        assert main(["--out", str(tmp_path / folder), *world.options()]) == 0
    assert "27 cells: 11 not run, 16 reduced only" in capsys.readouterr().out
    text = (tmp_path / "one" / "coverage.md").read_text()
    assert text == (tmp_path / "two" / "coverage.md").read_text()
    assert "| all | 0 | 0 | 0 | 0 | 16 | 11 | 27 |" in text
    assert "Measured here on: nothing yet." in text
    assert "Measured here on: a; b." in page(coverage(world.folders), ["a", "b"])


def test_a_missing_sweep_is_one_sentence(world, monkeypatch, tmp_path, capsys):
    only(monkeypatch, world)
    (world.folders.sweeps / "gradnorm_cifar.yaml").unlink()
    assert main(["--out", str(tmp_path), *world.options()]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_no_benchmark_no_machines(tmp_path):
    assert machines(tmp_path) == []


def test_the_projects_list_shows_what_its_rows_hold():
    listed = ROOT / "results" / "tables" / "coverage.md"
    if not listed.is_file():
        pytest.skip("results/tables/coverage.md was not made yet: python -m groupwise.analysis.coverage")
    measured = ROOT / "results" / "measured"
    lines = coverage(Folders(ROOT / "results" / "paper", measured, ROOT / "sweeps"))
    assert page(lines, machines(measured)) == listed.read_text(), "run python -m groupwise.analysis.coverage"
