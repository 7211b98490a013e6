"""What a warned job does, without any cluster; a handler stands in for submitit's."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from groupwise.errors import UserError
from groupwise.sweeps import slurm
from groupwise.training.train import _stop_flag

SOURCE = Path(__file__).resolve().parents[2] / "src"
WARNED = """
import os, signal, sys, time
from groupwise.sweeps.slurm import in_job
def work(_):
    {before}
    os.kill(os.getpid(), signal.{signal})
    {after}
    time.sleep(600)
def requeue(*_):
    print("requeued")
    sys.exit(-1)
signal.signal(signal.SIGUSR2, requeue)
in_job(work, {seconds})(None)
"""


def ended(before: str = "", after: str = "", seconds: float = 600, sent: str = "SIGUSR2") -> tuple[int, list[str]]:
    """How a task ends that gets USR2 so many seconds before its time is over."""
    done = subprocess.run(
        [sys.executable, "-c", WARNED.format(before=before, after=after, seconds=seconds, signal=sent)],
        env=os.environ | {"PYTHONPATH": str(SOURCE)},
        capture_output=True,
        text=True,
    )
    return done.returncode, (done.stdout + done.stderr).splitlines()


def test_a_warned_task_is_requeued_by_submitit():
    assert ended() == (255, ["interrupted: the job can resume from its last checkpoint", "requeued"])


def test_a_task_that_slurm_itself_stops_is_not_requeued_twice():
    assert ended(sent="SIGTERM") == (130, ["interrupted: the job can resume from its last checkpoint"])


def test_a_run_that_heeds_sigterm_ends_its_step_first():
    flag = "stop = []; signal.signal(signal.SIGTERM, lambda *_: stop.append(1))"
    code, told = ended(flag, "time.sleep(0.01); print(stop); raise KeyboardInterrupt")
    assert code == 255 and told[0] == "[1]" and told[-1] == "requeued"


def test_a_step_that_takes_too_long_is_given_up_before_the_time_is_over():
    assert ended("signal.signal(signal.SIGTERM, signal.SIG_IGN)", seconds=1) == (255, ["requeued"])


def test_only_a_second_ctrl_c_does_not_wait_for_the_end_of_the_step():
    with _stop_flag() as stop:
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGINT):
            signal.raise_signal(number)
        assert len(stop) == 3
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize(
    ("processes", "most", "nodes", "tasks"), [(1, 8, 1, 1), (4, 8, 1, 4), (16, 8, 2, 8), (9, 3, 3, 3)]
)
def test_a_run_takes_a_task_a_process(processes, most, nodes, tasks):
    words = slurm.job_words(OmegaConf.create({"tasks_per_node": most}), processes)
    assert words == [f"hydra.launcher.nodes={nodes}", f"hydra.launcher.tasks_per_node={tasks}"]


def test_jobs_are_over_when_they_were_missing_twice(tmp_path, monkeypatch):
    for name in ("7_0", "7_1"):
        (tmp_path / "logs" / name).mkdir(parents=True)
    queue = tmp_path / "queue"
    (tmp_path / "squeue").write_text(f"#!/bin/sh\ncat {queue}\n")
    (tmp_path / "squeue").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    answers = iter(["7_0 7_1", "7_1", None, "7_0", "7_0", "7_1", ""])

    def pause(_):
        answer = next(answers)
        queue.unlink(missing_ok=True)
        if answer is not None:
            queue.write_text(answer)

    slurm.wait_for_the_others(RuntimeError("7_0 has not produced any output"), tmp_path, pause)
    assert next(answers, "all used") == "all used"
    with pytest.raises(UserError, match=r"^SLURM refused the jobs \(Invalid account\)"):
        slurm.wait_for_the_others(RuntimeError("it failed\nsbatch: error: Invalid account"), tmp_path, pause)


def test_processes_that_do_not_share_out_are_refused():
    with pytest.raises(UserError, match="9 processes cannot be split evenly"):
        slurm.job_words(OmegaConf.create({"tasks_per_node": 8}), 9)
