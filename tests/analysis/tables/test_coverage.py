"""Every cell of every sweep is listed with its status."""

from collections import Counter

import pytest
import yaml

from groupwise.analysis import coverage as module
from groupwise.analysis.claims import CLAIMS
from groupwise.analysis.coverage import coverage
from groupwise.analysis.results import CONSTANT, SHOWN, TABLES, Folders
from groupwise.analysis.searches import page, searches
from groupwise.analysis.statistics import NOT_RUN, REDUCED, UNINFORMATIVE
from groupwise.analysis.tables import main
from tests.analysis.tables.conftest import ROOT

PROJECT = Folders.of_checkout()


@pytest.fixture
def world(world, monkeypatch):
    """The project, restricted to two tables, one figure of rows and one of norms."""
    monkeypatch.setattr(module, "TABLES", ("fixed_per_layer", "adaptivity"))
    monkeypatch.setattr(module, "KINDS", {name: module.KINDS[name] for name in ("quantile_budget", "gradnorm_cifar")})
    grids = {
        "quantile_budget": {"task": "cifar", "clip": "adaptive_layer", "clip.quantile_budget": [0.01, 0.1]},
        "gradnorm_cifar": {"task": "cifar", "clip": "adaptive_layer"},
    }
    for name, grid in grids.items():
        content = {"grids": [grid | {"privacy.epsilon": 8, "seed": [0]}], "scales": {"mini": {}}}
        (world.folders.sweeps / f"{name}.yaml").write_text(f"# {name}\n" + yaml.safe_dump(content))
    return world


def test_statuses_follow_the_rows(world):
    rows = world.rows("fixed_per_layer", "paper")
    world.write(rows.drop(index=6), "fixed_per_layer", "paper")
    world.write(world.rows("adaptivity"), "adaptivity")
    world.write(world.rows("quantile_budget", "paper").head(1), "quantile_budget", "paper")
    world.write(world.rows("gradnorm_cifar"), "gradnorm_cifar")
    status = coverage(world.folders).set_index(["sweep", "cell"])["status"]
    assert status["fixed_per_layer", "clip=fixed_layer privacy.epsilon=3 task=cifar"] == "incomplete"
    assert status["fixed_per_layer", "clip=flat privacy.epsilon=3 task=cifar"] == "differs"
    assert set(status["adaptivity"]) == {"reduced only"}
    assert status["quantile_budget"].tolist() == ["run in full", "not run"]
    assert status["gradnorm_cifar"].tolist() == ["reduced only"]


def test_cells_that_the_paper_never_measured_are_not_called_reproduced(world):
    world.write(world.rows("adaptivity", "paper"), "adaptivity", "paper")
    status = coverage(world.folders).set_index(["sweep", "cell"])["status"]["adaptivity"]
    run_in_full = [cell for cell in status.index if status[cell] == "run in full"]
    assert run_in_full == [f"clip=adaptive_flat privacy.epsilon={epsilon} task=cifar" for epsilon in (3, 8)]


def test_figure_cell_that_hardly_learned_is_uninformative(world):
    for accuracy, status in ((30.0, "reduced only"), (10.5, "uninformative")):
        world.write(world.rows("gradnorm_cifar", value=lambda cell, seed, at=accuracy: at), "gradnorm_cifar")
        found = coverage(world.folders).set_index("sweep").loc["gradnorm_cifar"]
        assert found["status"] == status
        assert ("a constant prediction has 10.0" in found["why"]) == (status == "uninformative")


def test_page_has_counts_and_is_deterministic(world, tmp_path, capsys):
    world.write(world.rows("adaptivity"), "adaptivity")
    for folder in ("one", "two"):
        assert main(["coverage", "--out", str(tmp_path / folder)], world.folders) == 0
    assert "27 cells: 11 not run, 16 reduced only" in capsys.readouterr().out
    text = (tmp_path / "one" / "coverage.md").read_text()
    assert text == (tmp_path / "two" / "coverage.md").read_text()
    assert "| all | 0 | 0 | 0 | 0 | 16 | 0 | 11 | 27 |" in text


def test_readme_has_the_counts_of_the_committed_coverage():
    lines = coverage(PROJECT)
    count = Counter(lines["status"])
    sentence = f"Of {len(lines)} cells of tables and figures, {count[REDUCED]} are measured at reduced scale, "
    sentence += f"{count[UNINFORMATIVE]} are too small to conclude anything, and {count[NOT_RUN]} were not run."
    assert sentence in " ".join((ROOT / "README.md").read_text().split())


def test_every_committed_file_of_rows_is_shown():
    endings = [(name, ending) for name in TABLES for ending in ("", "_texts")]
    endings += [(name, ending) for name, kind in module.KINDS.items() for ending in {"", kind.suffix}]
    endings += [(claim.contrast.sweep, "") for claim in CLAIMS]
    read = {f"{name}_{scale}{ending}.csv" for name, ending in endings for scale in SHOWN} | {CONSTANT}
    read |= {path.name for path in searches(PROJECT.sweeps, PROJECT.measured).values()}
    there = {path.name for path in PROJECT.measured.glob("*.csv")}
    assert CONSTANT in there and there <= read


def test_search_lists_all_cells_and_marks_the_best(tmp_path, capsys):
    measured, sweeps, out = tmp_path / "measured", tmp_path / "sweeps", tmp_path / "out"
    measured.mkdir()
    sweeps.mkdir()
    (sweeps / "search_cifar.yaml").write_text("")
    rates = {"2": 40.0, "4": 43.5, "8": 42.0}
    cells = {f"clip=flat optim.learning_rate={rate} task=cifar": value for rate, value in rates.items()}
    lines = [f"search_cifar,{cell},0,mini,{value}" for cell, value in cells.items()]
    (measured / "search_cifar_mini.csv").write_text("\n".join(["sweep,cell,seed,scale,valid/accuracy", *lines, ""]))
    options, folders = ["searches", "--out", str(out)], Folders(measured=measured, sweeps=sweeps)
    assert main(options, folders) == 0
    text = (out / "searches.md").read_text()
    assert "| `clip=flat optim.learning_rate=4 task=cifar` | 43.50 | 1 | best |" in text
    assert text.count("| best |") == 1 and "learning_rate=8 task=cifar` | 42.00 | 1 |  |" in text
    (measured / "search_cifar_mini.csv").write_text("sweep,cell,seed,scale\nsearch_cifar,clip=flat task=cifar,0,mini\n")
    assert main(options, folders) == 2
    assert "no row of the search has valid/accuracy" in capsys.readouterr().err


def test_only_networks_of_ours_and_searches_are_listed(tmp_path):
    for name in ("scatter_cnn", "cifar"):
        (tmp_path / f"{name}.yaml").write_text("")
    head, mode = "sweep,cell,seed,scale,valid/accuracy", "scatter_cnn,clip={} task=cifar,{},paper,{}"
    lines = [mode.format(clip, seed, 60 + seed) for clip in ("flat", "fixed_layer") for seed in range(3)]
    for name in ("scatter_cnn", "cifar"):
        (tmp_path / f"{name}_paper.csv").write_text("\n".join([head, *lines, ""]).replace("scatter_cnn", name))
    text = page(Folders(measured=tmp_path, sweeps=tmp_path)).text
    assert "## scatter_cnn, scale=paper" in text and "## cifar" not in text
    assert "| `clip=flat task=cifar` | 61.00 ± 1.00 | 3 |  |" in text
    assert "| `clip=fixed_layer task=cifar` | 61.00 ± 1.00 | 3 |  |" in text
