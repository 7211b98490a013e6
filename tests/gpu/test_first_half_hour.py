"""scripts/gpu/first_half_hour.sh at the smallest sizes on a CPU writes rows, logs and a checkpoint, and resumes."""

import csv
import json
import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "gpu" / "first_half_hour.sh"


def command(step: str, out: Path, **settings: str) -> subprocess.CompletedProcess[str]:
    usual = {"DEVICE": "cpu", "TINY": "true", "SCALE": "smoke", "LIMIT": "300", "OMP_NUM_THREADS": "1"}
    kept = {name: value for name, value in os.environ.items() if name not in ("OUT", "KIT")}
    return subprocess.run(
        ["bash", str(SCRIPT), step, str(out)], capture_output=True, text=True, env={**kept, **usual, **settings}
    )


@pytest.mark.parametrize("step", ["", "5", "one"])
def test_unknown_step_is_refused(tmp_path: Path, step: str) -> None:
    done = command(step, tmp_path)
    assert done.returncode == 2 and done.stderr == f"error: step '{step}' was given: give 1, 2, 3 or 4.\n"
    assert not list(tmp_path.iterdir())


def test_fourth_step_without_a_run_is_refused(tmp_path: Path) -> None:
    done = command("4", tmp_path)
    assert done.returncode == 2 and "has no run to resume: give step 3 first" in done.stderr


@pytest.mark.parametrize("code", [1, 3, 4])
def test_failed_tests_fail_the_repeated_step_too(tmp_path: Path, code: int) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\ncase "$*" in *"-m pytest"*) exit {code} ;; esac\n')
    python.chmod(0o755)
    assert [command("1", tmp_path / "out", PYTHON=str(python)).returncode for _ in range(2)] == [1, 1]
    assert command("2", tmp_path / "out", PYTHON=str(python), LIMIT="20").returncode == 4


@pytest.mark.slow
def test_first_step_writes_test_results_rows_and_a_profile(tmp_path: Path) -> None:
    settings = {"TESTS": "-k linear_2d", "STEPS": "microbatch=2 precision=float32,tf32 repeats=1"}
    done = command("1", tmp_path, **settings)
    assert done.returncode == 0, done.stdout + done.stderr
    with (tmp_path / "device_steps.csv").open(newline="") as lines:
        rows = list(csv.DictReader(lines))
    assert [(row["layout"], row["microbatch"], row["precision"], row["status"][:7]) for row in rows] == [
        ("channels_last", "2", "float32", "ok"),
        ("channels_last", "2", "tf32", "refused"),
        ("contiguous", "2", "float32", "ok"),
        ("contiguous", "2", "tf32", "refused"),
    ]
    assert 'failures="0"' in (tmp_path / "cuda-tests.xml").read_text()
    assert "aten::" in (tmp_path / "profile-wrn16_4_ws-(tiny)-adaptive_layer-2-float32-contiguous.txt").read_text()
    before = (tmp_path / "device_steps.csv").read_bytes()
    assert command("1", tmp_path, **settings).returncode == 0
    assert (tmp_path / "device_steps.csv").read_bytes() == before, "existing rows are not measured again"


@pytest.mark.slow
def test_second_step_continues_until_the_table_is_complete(tmp_path: Path) -> None:
    table = "rounds=1 steps=1 workload=wrn16_4_ws dtype=float32"
    first = command("2", tmp_path, TABLE=f"{table} limit=0.001", LIMIT="3000")
    assert first.returncode == 4 and "repeat the command to continue" in first.stdout, first.stdout + first.stderr
    done = command("2", tmp_path, TABLE=table, LIMIT="3000")
    assert done.returncode == 0, done.stdout + done.stderr
    with (tmp_path / "throughput.csv").open(newline="") as lines:
        rows = [row for row in csv.DictReader(lines) if row["status"] == "ok"]
    methods = ("none", "adaptive_layer", "flat", "ghost", "block", "opacus_hooks", "opacus_ghost")
    assert {row["method"] for row in rows} == set(methods)
    assert {(row["workload"], row["dtype"]) for row in rows} == {("wrn16_4_ws (tiny)", "float32")}
    assert (tmp_path / "step-2.log").stat().st_size > 0


@pytest.mark.slow
def test_fourth_step_resumes_the_third(tmp_path: Path) -> None:
    cell = {"CELL": "train.steps=12"}
    third = command("3", tmp_path, LIMIT="25", **cell)
    assert third.returncode in (0, 4), third.stdout + third.stderr
    fourth = third
    for _ in range(6):
        resumable = bool(list(tmp_path.glob("runs/*/checkpoint.pt")) or list(tmp_path.glob("runs/*/DONE")))
        fourth = command("4" if resumable else "3", tmp_path, **cell)
        if fourth.returncode == 0:
            break
    assert fourth.returncode == 0, fourth.stdout + fourth.stderr
    (run,) = (tmp_path / "runs").iterdir()
    row = json.loads((run / "result.json").read_text())
    assert row["plan.steps"] == 12 and row["privacy.epsilon"] == 3 and row["clip.name"] == "adaptive_layer"
    assert (run / "DONE").is_file() and (tmp_path / "step-4.log").is_file() == (fourth.args[2] == "4")
