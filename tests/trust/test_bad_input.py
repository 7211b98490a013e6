"""`trust.bad_input` gives each planted defect its verdict, and finds none in a sample of its attempts."""

import csv
import itertools
import os
import subprocess
import sys
import time
from collections import deque
from functools import partial
from pathlib import Path

import pytest

from groupwise.cli import main as command
from groupwise.config.compose import to_run_config
from groupwise.errors import UserError
from trust.bad_input.__main__ import RESULTS, VERDICTS
from trust.bad_input.attempt import ROOT, Attempt, attempt_all
from trust.bad_input.configs import config_attempts
from trust.bad_input.files import file_attempts, kinds, make_templates
from trust.bad_input.surroundings import surrounding_attempts

RUN = ("scale=smoke", "clip=flat")


def verdict(attempt, monkeypatch, tmp_path, plant=None, patience=60.0):
    """The verdict on one attempt, with `plant` in place of the check of its configuration."""
    monkeypatch.setenv("GROUPWISE_CACHE", str(tmp_path / "cache"))
    if plant is not None:
        monkeypatch.setattr(command, "to_run_config", plant)
    [outcome] = attempt_all([attempt], patience, 1)
    return outcome.verdict


def refusing(before):
    """A configuration check that calls `before` and then refuses."""

    def plant(_):
        before()
        raise UserError("no.")

    return plant


def unfinished(composed):
    """Accept the configuration, and create a run folder that is never finished."""
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
        (refusing(lambda: Path("UNPICKLED").touch()), "outside"),
    ],
)
def test_each_defect_has_its_verdict(plant, expected, monkeypatch, tmp_path):
    try:
        assert verdict(Attempt("config", RUN), monkeypatch, tmp_path, plant) == expected
    finally:
        for file in Path("/tmp").glob("groupwise-outside-*"):
            file.unlink()


@pytest.mark.parametrize(
    ("never_ends", "wait", "expected"),
    [(partial(time.sleep, 600), 0.25, "hung"), (lambda: deque(itertools.count(), maxlen=0), 1000, "stopped")],
)
def test_endless_attempt_is_stopped(never_ends, wait, expected, monkeypatch, tmp_path):
    monkeypatch.setattr("trust.bad_input.attempt.WAIT", wait)
    plant = refusing(never_ends)
    assert verdict(Attempt("config", RUN), monkeypatch, tmp_path, plant, patience=2.0) == expected


def test_success_without_a_run_is_silent(monkeypatch, tmp_path):
    """Replaces the training of `run.py` by a function that does nothing."""
    from groupwise.processes import start as processes

    monkeypatch.setattr(processes, "start", lambda config: {})
    assert verdict(Attempt("config", RUN, trains=True), monkeypatch, tmp_path) == "silent"
    assert verdict(Attempt("config", (*RUN, "--cfg=job"), trains=True), monkeypatch, tmp_path) == "ran"


def test_refused_run_that_changes_a_file_is_partial(monkeypatch, tmp_path):
    def prepare(folder):
        (folder / "mine").write_text("mine")

    plant = refusing(lambda: Path("mine").unlink())
    assert verdict(Attempt("config", RUN, prepare), monkeypatch, tmp_path, plant) == "partial"
    assert verdict(Attempt("config", RUN, prepare), monkeypatch, tmp_path, refusing(lambda: None)) == "refused"


def test_network_connection_fails(monkeypatch, tmp_path):
    import socket

    plant = refusing(lambda: socket.create_connection(("localhost", 1)))
    assert verdict(Attempt("config", RUN), monkeypatch, tmp_path, plant) == "traceback"


def test_committed_table_has_a_row_for_each_kind(tmp_path):
    (tmp_path / "stopped" / "runs").mkdir(parents=True)
    tried = [*config_attempts(0, 100), *surrounding_attempts(), *file_attempts(0, 60, tmp_path)]
    with open(RESULTS, newline="") as file:
        assert [row["kind"] for row in csv.DictReader(file)] == sorted({attempt.kind for attempt in tried})


@pytest.mark.slow
def test_undamaged_files_run(tmp_path, monkeypatch):
    """Otherwise damaged files might be refused for another reason."""
    monkeypatch.setenv("GROUPWISE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache" / "datasets")
    make_templates(tmp_path / "templates")
    tried = [Attempt(kind.name, kind.arguments, kind.sound, trains=True) for kind in kinds(tmp_path / "templates")]
    verdicts = {outcome.attempt.kind: outcome.verdict for outcome in attempt_all(tried, 60.0, 1)}
    assert verdicts.pop("CIFAR batches") == "refused"  # these files are not the published ones
    assert set(verdicts.values()) == {"ran"}


@pytest.mark.slow
def test_sample_of_attempts_has_no_defect(tmp_path):
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
