"""`benchmarks.small_models` trains each model by each method and writes the rows."""

import pandas as pd
import pytest

from benchmarks import small_models
from benchmarks.small_models import METHODS, MODELS, SmallModelOptions, main, measure, run

ONCE = SmallModelOptions(rounds=1, steps=1)
HERE = [method for method in METHODS if method != "fastdp_flat" and not method.endswith("_graph")]


@pytest.mark.parametrize(
    "name", ["logistic", *(pytest.param(name, marks=pytest.mark.slow) for name in ("lstm", "transformer"))]
)
def test_each_method_trains_and_plain_ratio_is_one(name):
    rows = {row["method"]: row for row in measure(name, HERE, ONCE)}
    assert list(rows) == HERE and {row["status"] for row in rows.values()} == {"ok"}
    assert rows["none"]["ratio"] == 1.0
    assert all(row["milliseconds"] > 0 and row["parameters"] > 0 for row in rows.values())


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_every_model_trains_with_make_private(name):
    assert [row["status"] for row in measure(name, ["none", "adaptive_layer", "flat"], ONCE)] == ["ok"] * 3


def test_rows_are_written_and_wrong_options_refused(tmp_path, capsys):
    command = ["model=logistic", "method=flat", "rounds=1", "steps=1", f"out={tmp_path}"]
    assert main(command) == 0
    rows = pd.read_csv(tmp_path / "small_models.csv")
    assert rows["method"].tolist() == ["none", "flat"] and rows["commit"].notna().all()
    assert main(["model=logistik"]) == 2 and main(["method=opakus_hooks"]) == 2
    assert "logistic" in capsys.readouterr().err
    assert main([*command, "jax=/no/python"]) == 2


def test_jax_is_not_measured_beside_a_gpu(tmp_path, monkeypatch):
    """Its process would use the CPU."""
    row = {"model": "logistic", "method": "none", "batch": 256, "device": "cuda", "threads": 1, "dtype": "float32"}
    monkeypatch.setattr(small_models, "measure", lambda *_: [row])
    monkeypatch.setattr("benchmarks.results.hardware", lambda device: "a GPU")
    run(SmallModelOptions(model="logistic", device="cuda", jax="/no/python", out=str(tmp_path)))
    assert pd.read_csv(tmp_path / "small_models.csv")["method"].tolist() == ["none"]
