"""Whole updates at full size: rows beside the non-private one."""

from typing import Any

import pandas as pd
import pytest

from benchmarks import full_size
from benchmarks.full_size import MODELS, main
from benchmarks.job import Job
from benchmarks.worker import Bench, answer
from tests.benchmarks.pretended import answering

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


def here(job: Job, **request: Any) -> dict[str, Any]:
    """What a process would answer."""
    return answer(Bench(job), request)


@pytest.mark.slow  # four models
def test_every_model_runs_beside_its_non_private_update(monkeypatch, tmp_path, capsys) -> None:
    monkeypatch.setattr(full_size, "Process", answering(here))
    command = ["tiny=true", "layers=2", "batch=3", "tokens=5", f"out={tmp_path}"]
    assert main(command) == 0
    printed = capsys.readouterr().out
    rows = pd.read_csv(tmp_path / "full_size.csv")
    assert [tuple(pair) for pair in rows[["model", "method"]].to_numpy()] == [
        (f"{name} (tiny)", method) for name, model in MODELS.items() for method in model.methods
    ]
    assert all(f"{name} (tiny)" in printed for name in MODELS)
    assert set(rows["status"]) == {"ok"} and (rows[["wall_seconds", "peak_bytes"]] > 0).all(axis=None)
    assert rows["memory_ratio"].between(0.9, 1.25).all() and rows["torch"].notna().all()
    adapters = rows["model"] == "gpt2_xl (tiny)"
    assert (rows["trainable"] < rows["parameters"])[adapters].all() and set(rows["dtype"][adapters]) == {"bfloat16"}
    assert main([*command, "model=gpt2"]) == 0
    assert len(pd.read_csv(tmp_path / "full_size.csv")) == len(rows)


def test_what_does_not_run_is_a_row_too(monkeypatch, tmp_path, capsys) -> None:
    monkeypatch.setattr(full_size, "Process", answering(lambda job, do: {"refused": "out of memory"}))
    assert main(["tiny=true", "model=gpt2_xl", f"out={tmp_path}"]) == 0
    assert capsys.readouterr().out.count("refused: out of memory") == 3
    rows = pd.read_csv(tmp_path / "full_size.csv")
    assert set(rows["status"]) == {"refused: out of memory"}
