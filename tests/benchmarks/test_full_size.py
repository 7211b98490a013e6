"""Whole updates at full size: rows beside the non-private one, and a plan where a model does not run."""

from __future__ import annotations

import gc
from typing import Any

import pandas as pd
import pytest

from benchmarks import full_size
from benchmarks.full_size import COLUMNS, MODELS, FullOptions, job, main
from benchmarks.job import Job
from benchmarks.methods import prepare
from benchmarks.planned import kept_bytes, plan
from benchmarks.worker import Bench, answer

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


class Here:
    """`Process` without a process."""

    def __init__(self, job: Job, limit: float) -> None:
        self._bench = Bench(job)

    def ask(self, **request: Any) -> dict[str, Any]:
        gc.collect()  # what is freed meanwhile, from before, would count as negative
        return answer(self._bench, request)

    def __enter__(self) -> Here:
        return self

    def __exit__(self, *_: object) -> None:
        pass


class Dead(Here):
    def ask(self, **request: Any) -> dict[str, Any]:
        return {"refused": "out of memory"}


@pytest.mark.slow  # four models
def test_every_model_runs_beside_its_non_private_update(monkeypatch, tmp_path, capsys) -> None:
    monkeypatch.setattr(full_size, "Process", Here)
    command = ["tiny=true", "layers=2", "batch=3", "tokens=5", f"out={tmp_path}"]
    assert main(command) == 0
    printed = capsys.readouterr().out
    rows = pd.read_csv(tmp_path / "full_size.csv")
    assert list(rows.columns) == list(COLUMNS)
    assert [tuple(pair) for pair in rows[["model", "method"]].to_numpy()] == [
        (f"{name} (tiny)", method) for name, model in MODELS.items() for method in model.methods
    ]
    assert all(f"{name} (tiny): B 3, T 5, 2 layers" in printed for name in MODELS)
    assert set(rows["status"]) == {"ok"} and (rows[["wall_seconds", "peak_bytes"]] > 0).all(axis=None)
    assert rows["memory_ratio"].between(0.9, 1.25).all() and rows["torch"].notna().all()
    adapters = rows["model"] == "gpt2_xl (tiny)"
    assert (rows["trainable"] < rows["parameters"])[adapters].all() and set(rows["dtype"][adapters]) == {"bfloat16"}
    assert main([*command, "model=gpt2"]) == 0
    assert len(pd.read_csv(tmp_path / "full_size.csv")) == len(rows)


def test_what_does_not_run_is_planned(monkeypatch, tmp_path, capsys) -> None:
    monkeypatch.setattr(full_size, "Process", Dead)
    assert main(["tiny=true", "model=gpt2_xl", f"out={tmp_path}"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("refused: out of memory") == 3 and "frozen weights" in printed
    rows = pd.read_csv(tmp_path / "full_size.csv")
    assert set(rows["status"]) == {"refused: out of memory"} and rows["peak_bytes"].isna().all()


def test_planned_runs_nothing_and_writes_nothing(monkeypatch, tmp_path, capsys) -> None:
    monkeypatch.setattr(full_size, "Process", None)
    assert main(["tiny=true", "planned=true", f"out={tmp_path / 'out'}"]) == 0
    assert capsys.readouterr().out.count("optimizer state") == 3
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("few_objects")
@pytest.mark.parametrize("name", MODELS)
def test_a_plan_is_what_a_model_of_that_depth_holds(name: str) -> None:
    asked = job(name, "none", FullOptions(tiny=True, layers=4))
    planned, (workload, _) = plan(asked), prepare(asked)
    sizes = [p.numel() * (4 if p.requires_grad else p.element_size()) for p in workload.model.parameters()]
    assert planned.frozen_weights + planned.trained_weights == sum(sizes)
    trained = sum(4 * p.numel() for p in workload.trainable)
    assert planned.trained_weights == planned.gradients == planned.optimizer_state / 2 == trained
    assert planned.activations == kept_bytes(asked)
    peak = Here(asked, limit=0).ask(do="update")["peak_bytes"]
    assert 0.6 * peak < planned.total < 1.4 * peak
