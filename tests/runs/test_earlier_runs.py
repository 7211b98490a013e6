"""The cost of starting weights: budgets on the same data add up, and weights of unknown data are not private."""

import json
import shutil
from pathlib import Path

import pytest

from groupwise.audit.reaccount import verify
from groupwise.config.compose import compose_run
from groupwise.errors import UserError
from groupwise.run import run
from groupwise.training.earlier_runs import earlier_runs
from tests.checked import checked_once

ROOT = Path(__file__).resolve().parents[2]
PRIVATE = ("privacy.epsilon=null", "privacy.noise_multiplier=0.7", "privacy.accountant=rdp")
TEXT = ("task=sst2", "scale=smoke", "clip=fixed_layer", "optim=sgd", "model.pool=first")


def trained(results: Path, *overrides: str):
    """Run one step; return the row of results and the folder."""
    words = ["train.steps=1", f"paths.results={results}", *overrides]
    words = words if any(word.startswith("task=") for word in words) else ["task=cifar", "scale=smoke", *words]
    config = compose_run([*words, *(() if "clip=none" in words else PRIVATE)], ROOT / "conf")
    with checked_once(config.clip.name):
        row = run(config)
    return row, results / "runs" / row["hash"][:12]


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("plain"), "clip=none")[1]


@pytest.fixture(scope="module")
def private(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("private"), "seed=1")


def failures(folder: Path) -> list[str]:
    return [f"{name}: {what}" for name, (good, what) in verify(folder).items() if not good]


def test_weights_of_a_run_without_privacy_on_the_same_data_make_the_run_not_private(plain, tmp_path, capsys):
    row, folder = trained(tmp_path, f"model.weights={plain}")
    assert row["plan.private"] is False and row["plan.total_epsilon"] == "inf"
    assert row["plan.spent_epsilon"] < 100, "what this run alone spent stays in the row"
    printed = capsys.readouterr().out
    assert "NOT PRIVATE: the weights come from" in printed and "(NOT PRIVATE)" in printed
    assert json.loads((folder / "privacy.json").read_text())["spent"]["guaranteed"] is False
    assert not failures(folder)
    third, _ = trained(tmp_path / "third", f"model.weights={folder / 'model.pt'}", "seed=2")
    assert third["plan.private"] is False, "the run before the last counts too"


def test_budgets_on_the_same_data_add_up(private, tmp_path, capsys):
    before, start = private
    row, folder = trained(tmp_path, f"model.weights={start}")
    assert row["plan.private"] is True
    assert row["plan.total_epsilon"] == pytest.approx(row["plan.epsilon"] + before["plan.epsilon"])
    assert row["plan.total_delta"] == pytest.approx(row["plan.delta"] + before["plan.delta"])
    total = f"With the runs of its starting weights: epsilon {row['plan.total_epsilon']:.4g} at delta 2e-05"
    assert total in capsys.readouterr().out
    assert not failures(folder)
    privacy = json.loads((folder / "privacy.json").read_text())
    for changed in ({"total": {**privacy["total"], "epsilon": row["plan.epsilon"]}}, {"private": False}):
        (folder / "privacy.json").write_text(json.dumps(privacy | changed))
        assert any(found.startswith("private or not") for found in failures(folder))


def test_a_source_whose_weights_are_replaced_adds_nothing(private, tmp_path):
    _, folder = private
    record = {"privacy": {"private": True, "epsilon": 1.0, "delta": 1e-5}, "hash": "of the source"}
    (tmp_path / "provenance.json").write_text(json.dumps(record))
    assert [run["run"] for run in earlier_runs(None, str(tmp_path))] == ["of the sourc"]
    assert [run["run"] for run in earlier_runs(str(folder), str(tmp_path))] == [folder.name]


def test_weights_without_a_record_are_of_unknown_data(private, tmp_path, capsys):
    shutil.copy(private[1] / "model.pt", tmp_path)
    row, _ = trained(tmp_path, f"model.weights={tmp_path / 'model.pt'}")
    assert row["plan.private"] is False and "NOT PRIVATE" in capsys.readouterr().out


def test_a_record_that_cannot_be_read_is_refused_before_anything_is_written(private, tmp_path):
    broken = tmp_path / "broken"
    shutil.copytree(private[1], broken)
    (broken / "privacy.json").write_text("{}")
    with pytest.raises(UserError, match=r"record beside the weights in .* cannot be read"):
        trained(tmp_path, f"model.weights={broken}")
    assert not (tmp_path / "runs").exists()


def test_the_budget_of_an_exported_model_is_added(tmp_path, capsys):
    """Of a private model; one that was trained on synthetic data adds nothing."""
    trained(tmp_path, *TEXT, "clip=none", f"export={tmp_path / 'plain'}")
    trained(tmp_path, *TEXT, "seed=1", f"export={tmp_path / 'noised'}")
    record = tmp_path / "noised" / "provenance.json"
    record.write_text(record.read_text().replace('"data.name": "synthetic"', '"data.name": "files"'))
    row, _ = trained(tmp_path, *TEXT, "model=hub", f"model.source={tmp_path / 'noised'}", "model.fresh=false")
    assert row["plan.private"] is True and row["plan.total_epsilon"] > row["plan.epsilon"]
    capsys.readouterr()
    row, _ = trained(tmp_path, *TEXT, "model=hub", f"model.source={tmp_path / 'plain'}", "model.fresh=false")
    assert row["plan.private"] is True and "plan.total_epsilon" not in row, "the plain run's data were synthetic"
    assert "add nothing to the budget" in " ".join(capsys.readouterr().out.split())


def test_a_run_on_public_data_counts_where_its_data_are_protected(tmp_path, capsys):
    public = trained(tmp_path, "clip=none", "data.public=true")[1]
    (sha,) = json.loads((public / "data.json").read_text())["sha256"].values()
    (same,) = earlier_runs(str(public), None, [sha])
    (other,) = earlier_runs(str(public), None, ["0" * 64])
    assert (same["public"], other["public"], other["files"]) == (False, True, [sha])
    assert trained(tmp_path, f"model.weights={public}")[0]["plan.private"] is False
    assert "NOT PRIVATE: the weights come from" in capsys.readouterr().out
    (tmp_path / "result.json").write_text(json.dumps({"hash": "second", "task": "pretrain_on_patients"}))
    (tmp_path / "config.yaml").write_text("")
    plan = {"epsilon": 8.0, "delta": 1e-5}
    (tmp_path / "privacy.json").write_text(json.dumps({"private": True, "plan": plan, "earlier": [other]}))
    second, first = earlier_runs(str(tmp_path), None, [sha])
    assert (second["public"], first["public"]) == (False, False), "neither a name nor a run between makes data public"
