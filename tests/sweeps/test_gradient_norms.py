"""Kept weights, curves, and gradient norms of the kept weights, on short runs."""

import json

import pandas as pd
import pytest
import torch

from groupwise.config.compose import compose_run, register
from groupwise.config.identity import config_hash
from groupwise.run import run
from groupwise.sweeps import gradient_norms
from groupwise.sweeps.gradient_norms import COLUMNS, main, rows_of
from groupwise.sweeps.prepare import PlannedCell
from tests.combinations import CONF


@pytest.fixture(scope="module")
def planned(tmp_path_factory):
    register()
    results = tmp_path_factory.mktemp("results")
    overrides = ("scale=smoke", "clip=adaptive_layer", "train.keep=[0,0.25,9]", "eval.curve=true", "eval.every=0.25")
    overrides += ("privacy.accountant=rdp",)
    config = compose_run([*overrides, f"paths.results={results}"], CONF)
    run(config)
    return PlannedCell("clip=adaptive_layer task=cifar seed=0", 0, overrides, config, config_hash(config))


def test_weights_are_kept_at_the_chosen_epochs(planned):
    kept = {path.name for path in planned.run.glob("weights-*.pt")}
    assert kept == {"weights-0.pt", "weights-2.pt", "weights-4.pt"}  # 8 steps per epoch, 4 in total
    first, last = (torch.load(planned.run / f"weights-{step}.pt", weights_only=True) for step in (0, 4))
    final = torch.load(planned.run / "model.pt", weights_only=True)
    assert all(torch.equal(last[name], final[name]) for name in final)
    assert any(not torch.equal(first[name], final[name]) for name in final)


def test_each_evaluation_has_the_training_time(planned):
    lines = [json.loads(line) for line in (planned.run / "metrics.jsonl").read_text().splitlines()]
    points = [line for line in lines if "seconds" in line]
    assert [line["step"] for line in points] == [2, 4]
    assert 0 < points[0]["seconds"] < points[1]["seconds"]
    assert "seconds" not in json.loads((planned.run / "result.json").read_text())


def test_norms_cover_the_kept_weights_examples_and_layers(planned):
    rows = pd.DataFrame(rows_of(planned, planned.run, examples=5, layers=()))
    assert set(rows["step"]) == {0, 2, 4}
    assert set(rows["epoch"]) == {0, 0.25, 0.5}
    layers = rows["name"].nunique()
    assert len(rows) == 3 * 5 * layers
    assert (rows["norm"] > 0).all()
    heads = pd.DataFrame(rows_of(planned, planned.run, examples=5, layers=("stem", "*.conv?")))
    assert heads["name"].nunique() < layers
    assert rows.merge(heads, how="inner").shape[0] == len(heads)


def test_command_writes_one_table(planned, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gradient_norms, "table_cells", lambda *_: [planned])
    runs = str(planned.run.parent)
    assert main(["gradnorm_cifar", "scale=smoke", "--examples", "3", "--runs", runs, "--out", str(tmp_path)]) == 0
    table = pd.read_csv(tmp_path / "gradnorm_cifar_smoke_norms.csv")
    assert tuple(table) == COLUMNS
    assert set(table["cell"]) == {"clip=adaptive_layer task=cifar"}
    assert main(["gradnorm_cifar", "scale=smoke", "--runs", str(tmp_path)]) == 2
    assert "is not done" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(["nothing", "scale=mini"], "There is no sweep nothing"), (["cifar", "mini"], "give scale=NAME"),
     (["cifar", "scale=mini", "--examples", "0"], "one or more")],
)  # fmt: skip
def test_wrong_arguments_give_one_sentence(arguments, words, capsys):
    assert main(arguments) == 2
    assert words in capsys.readouterr().err
