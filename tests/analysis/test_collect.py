"""Only finished runs become rows, each with its provenance; collecting again changes nothing."""

import json
from pathlib import Path

import pandas as pd
import pytest

from groupwise.analysis.collect import collect, main
from groupwise.errors import UserError


def finished(runs: Path, name: str, done: bool = True, **row) -> None:
    folder = runs / name
    folder.mkdir(parents=True)
    columns = {"hash": name, "task": "cifar", "scale": "mini", "clip.name": "flat", "privacy.epsilon": 8.0, "seed": 0}
    (folder / "result.json").write_text(json.dumps(columns | row))
    if done:
        (folder / "DONE").write_text("")


def test_only_finished_and_chosen_runs_count(tmp_path):
    finished(tmp_path / "runs", "a", **{"valid/accuracy": 50.0})
    finished(tmp_path / "runs", "b", done=False)
    finished(tmp_path / "runs", "c", scale="smoke")
    frame = collect(tmp_path / "runs", tmp_path / "table.csv", scale="mini")
    assert frame["hash"].tolist() == ["a"]


def test_rows_are_merged_and_replaced(tmp_path):
    finished(tmp_path / "one", "a", **{"valid/accuracy": 50.0})
    finished(tmp_path / "two", "b", **{"valid/accuracy": 60.0, "privacy.epsilon": 3.0})
    table = tmp_path / "measured" / "table.csv"
    for runs in ("one", "two", "two"):
        collect(tmp_path / runs, table)
    assert pd.read_csv(table)["hash"].tolist() == ["b", "a"]  # sorted by epsilon
    text = table.read_text()
    collect(tmp_path / "one", table)
    assert table.read_text() == text


def test_nothing_to_collect_is_one_sentence(tmp_path, capsys):
    with pytest.raises(UserError, match="scale=mini"):
        collect(tmp_path, tmp_path / "table.csv", scale="mini")
    assert main([str(tmp_path / "table.csv"), "--runs", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith("error: No finished run")
    assert not (tmp_path / "table.csv").exists()
