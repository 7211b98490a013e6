"""The state of a cell is read from its folders."""

import json

import pytest

from groupwise.sweeps.status import main, status


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A sweep of four cells, one in each state."""
    monkeypatch.chdir(tmp_path)
    sweep = tmp_path / "results" / "sweeps" / "2026-01-01_00-00-00-table"
    (sweep / "failed").mkdir(parents=True)
    names = ["done", "begun", "failed", "waiting"]
    listed = [
        {"name": f"clip={name}", "hash": f"{name:0>12}", "run": f"results/runs/{name}", "done_before": False}
        for name in names
    ]
    (sweep / "cells.json").write_text(json.dumps({"scale": "mini", "cells": listed}))
    for name in names[:3]:
        run = tmp_path / "results" / "runs" / name
        run.mkdir(parents=True)
        (run / "config.hash").touch()
        (run / "metrics.jsonl").write_text("".join(json.dumps({"step": step}) + "\n" for step in range(1, 6)))
        (run / "privacy.json").write_text(json.dumps({"plan": {"steps": 20}}))
    (tmp_path / "results/runs/done/result.json").write_text(
        json.dumps({"system.wall_seconds": 100.0, "valid/accuracy": 50.123, "plan.spent_epsilon": 7.99612})
    )
    (tmp_path / "results/runs/done/DONE").touch()
    (sweep / "failed" / f"{'failed':0>12}.txt").write_text("RuntimeError: a bug\ncell: x\n")
    return sweep


def test_printed_lines_have_every_state(folder, capsys):
    assert main(["--cells"]) == 0
    where, first, *cells = capsys.readouterr().out.splitlines()
    assert where == "results/sweeps/2026-01-01_00-00-00-table"
    assert first == "  mini  4 cells: 1 done, 1 begun, 1 failed, 1 waiting"
    assert [line.split()[:2] for line in cells] == [
        [kind, f"clip={kind}"] for kind in ("done", "begun", "failed", "waiting")
    ]
    assert cells[1].endswith("  step 5 of 20")
    assert cells[0].endswith("valid/accuracy 50.12, epsilon 7.996 (not a guarantee), 100 s")
    assert cells[2].endswith("RuntimeError: a bug")
    assert len(status(folder)) == 3  # only the failed cell is listed
