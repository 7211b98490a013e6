"""The bad-input command: its verdicts, each on a planted defect, and a small sample of all that it tries."""

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest

from groupwise.cli import main as command
from groupwise.config.compose import to_run_config
from groupwise.errors import UserError
from trust.bad_input.__main__ import VERDICTS
from trust.bad_input.attempt import ROOT, Attempt, attempt_all
from trust.bad_input.files import kinds, make_templates

RUN = ("scale=smoke", "clip=flat")


def verdict(attempt, monkeypatch, tmp_path, plant=None, patience=60.0):
    """What comes of one attempt with `plant` in the place of the check of its configuration."""
    monkeypatch.setenv("GROUPWISE_CACHE", str(tmp_path / "cache"))
    if plant is not None:
        monkeypatch.setattr(command, "to_run_config", plant)
    [outcome] = attempt_all([attempt], patience, 1)
    return outcome.verdict


def refusing(before):
    """A mistake that does something before it is told."""

    def plant(_):
        before()
        raise UserError("no.")

    return plant


def unfinished(composed):
    """A sound configuration, and a run's folder that nobody finishes."""
    Path("results/runs/abc").mkdir(parents=True)
    return to_run_config(composed)


def fail():
    raise KeyError("a bug")


@pytest.mark.parametrize(
    ("plant", "expected"),
    [
        (None, "accepted"),
        (refusing(lambda: None), "refused"),
        (refusing(fail), "traceback"),
        (refusing(lambda: os._exit(3)), "traceback"),
        (refusing(lambda: print("a warning", file=sys.stderr)), "talkative"),
        (refusing(lambda: print("no.\n" * 300, file=sys.stderr)), "talkative"),
        (refusing(lambda: Path("left").touch()), "partial"),
        (refusing(lambda: Path("left").mkdir()), "partial"),
        (unfinished, "partial"),
        (refusing(lambda: open(f"/tmp/groupwise-outside-{os.getpid()}", "x").close()), "outside"),
        (refusing(lambda: os.system("true")), "outside"),
    ],
)
def test_each_defect_has_its_verdict(plant, expected, monkeypatch, tmp_path):
    try:
        assert verdict(Attempt("config", RUN), monkeypatch, tmp_path, plant) == expected
    finally:
        for file in Path("/tmp").glob("groupwise-outside-*"):
            file.unlink()


def test_what_never_ends_is_stopped(monkeypatch, tmp_path):
    import time

    plant = refusing(lambda: time.sleep(600))
    assert verdict(Attempt("config", RUN), monkeypatch, tmp_path, plant, patience=0.2) == "stopped"


def test_success_without_a_run_is_told(monkeypatch, tmp_path):
    """Another function stands in for `run.py`'s, and trains nothing."""
    from groupwise.processes import start as processes

    monkeypatch.setattr(processes, "start", lambda config: {})
    assert verdict(Attempt("config", RUN, trains=True), monkeypatch, tmp_path) == "silent"
    assert verdict(Attempt("config", (*RUN, "--cfg=job"), trains=True), monkeypatch, tmp_path) == "ran"


def test_a_file_that_was_there_may_not_change(monkeypatch, tmp_path):
    def prepare(folder):
        (folder / "mine").write_text("mine")

    plant = refusing(lambda: Path("mine").unlink())
    assert verdict(Attempt("config", RUN, prepare), monkeypatch, tmp_path, plant) == "partial"
    assert verdict(Attempt("config", RUN, prepare), monkeypatch, tmp_path, refusing(lambda: None)) == "refused"


def test_the_network_is_cut(monkeypatch, tmp_path):
    import socket

    plant = refusing(lambda: socket.create_connection(("localhost", 1)))
    assert verdict(Attempt("config", RUN), monkeypatch, tmp_path, plant) == "traceback"


@pytest.mark.slow
def test_what_is_not_damaged_runs(tmp_path, monkeypatch):
    """Else all damage would be refused for another reason."""
    monkeypatch.setenv("GROUPWISE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache" / "datasets")
    make_templates(tmp_path / "templates")
    tried = [Attempt(kind.name, kind.arguments, kind.sound, trains=True) for kind in kinds(tmp_path / "templates")]
    verdicts = {outcome.attempt.kind: outcome.verdict for outcome in attempt_all(tried, 60.0, 1)}
    assert verdicts.pop("CIFAR batches") == "refused"  # none of them is published
    assert set(verdicts.values()) == {"ran"}


@pytest.mark.slow
def test_a_sample_of_all_of_it_has_no_defect(tmp_path):
    out = tmp_path / "bad_input.csv"
    few = ("--configs", "64", "--files", "27", "--seed", "7", "--out", str(out))
    done = subprocess.run(
        [sys.executable, "-m", "trust.bad_input.__main__", *few],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    with open(out, newline="") as file:
        header, *rows = list(csv.reader(file))
    assert header == ["kind", "tried", *VERDICTS]
    assert sum(int(row[1]) for row in rows) > 120
