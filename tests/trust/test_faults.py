"""A few trials of each fault of `python -m trust.faults` lose nothing, and the command detects losses."""

import csv
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from trust.faults import __main__ as faults
from trust.faults.__main__ import FAULTS
from trust.faults.process import SEEDED, Outcome, complete, result_of, run_folder, same


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_no_trial_is_lost(name, tmp_path):
    fault, usual = FAULTS[name]
    trials = min(usual, 6)
    for outcome in fault(trials, tmp_path):
        assert outcome.lost == 0 and (outcome.tried >= trials or "not tried" in outcome.result)


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> tuple[Path, dict[str, Any]]:
    results = tmp_path_factory.mktemp("whole") / "results"
    process = complete(results, *SEEDED, "train.steps=4")
    assert process.code == 0, process.errors
    return results, result_of(results)


def _change_weights(folder: Path) -> None:
    model = torch.load(folder / "model.pt")
    model["stem.weight"][0, 0, 0, 0] += 1e-6
    torch.save(model, folder / "model.pt")


def _lose_a_line(folder: Path) -> None:
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text("".join(lines[1:]))


def _change_a_threshold(folder: Path) -> None:
    privacy = json.loads((folder / "privacy.json").read_text())
    privacy["thresholds"]["stem"] *= 1 + 1e-12
    (folder / "privacy.json").write_text(json.dumps(privacy))


HARM = {
    "nothing": lambda folder: None,
    "weights": _change_weights,
    "metrics": _lose_a_line,
    "thresholds": _change_a_threshold,
    "key": lambda folder: (folder / "checkpoint-previous.pt").write_text("key"),
    "litter": lambda folder: (folder / ".checkpoint.pt.x.partial").write_text("key"),
    "DONE": lambda folder: (folder / "DONE").unlink(),
}


@pytest.mark.parametrize("harm", HARM)
def test_altered_result_is_detected(finished, harm, tmp_path):
    results = shutil.copytree(finished[0], tmp_path / "results")
    HARM[harm](run_folder(results))
    assert same(results, finished[1]) is (harm == "nothing")


def test_only_a_one_sentence_error_counts_as_refused(tmp_path):
    refused = complete(tmp_path / "refused", "privacy.epsilon=-1")
    assert refused.refused()
    written = {"Traceback\nerror: one\n": False, "error: a\nb\n": False, "\r 0%|a\nwarning: a\nerror: b\n": True}
    for errors, good in written.items():
        refused.output.with_suffix(".err").write_text(errors)
        assert refused.refused() is good


def test_command_writes_its_table_and_fails_after_a_loss(tmp_path, monkeypatch, capsys):
    rows = [Outcome("a fault", 3, 0, "nothing, or so"), Outcome("another", 2, 1, "something")]
    monkeypatch.setattr(faults, "FAULTS", {"all": (lambda trials, work: rows[:trials], 2)})
    out = tmp_path / "faults.csv"
    assert faults.main(["--out", str(out)]) == 1
    assert "| another | 2 | 1 | something |" in capsys.readouterr().out
    assert [row["lost"] for row in csv.DictReader(out.open())] == ["0", "1"]
    assert faults.main(["--out", str(out), "--trials", "1"]) == 0
    monkeypatch.setattr(faults, "RESULT", tmp_path / "committed.csv")
    assert faults.main(["--trials", "1"]) == 0 and faults.main(["all"]) == 1 and not faults.RESULT.exists()
    assert faults.main([]) == 1 and faults.RESULT.exists()
