"""The behaviour of a warned SLURM job, tested without a cluster; a stub replaces the handler of submitit."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from submitit.core.utils import CommandFunction, FailedJobError

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
    """The exit code and output of a task that gets a signal `seconds` before its time limit."""
    done = subprocess.run(
        [sys.executable, "-c", WARNED.format(before=before, after=after, seconds=seconds, signal=sent)],
        env=os.environ | {"PYTHONPATH": str(SOURCE)},
        capture_output=True,
        text=True,
    )
    return done.returncode, (done.stdout + done.stderr).splitlines()


def test_warned_task_is_requeued_by_submitit():
    assert ended() == (255, ["interrupted: the job can resume from its last checkpoint", "requeued"])


def test_task_stopped_by_slurm_is_not_requeued_twice():
    assert ended(sent="SIGTERM") == (130, ["interrupted: the job can resume from its last checkpoint"])


def test_run_that_handles_sigterm_finishes_its_step():
    flag = "stop = []; signal.signal(signal.SIGTERM, lambda *_: stop.append(1))"
    code, lines = ended(flag, "time.sleep(0.01); print(stop); raise KeyboardInterrupt")
    assert code == 255 and lines[0] == "[1]" and lines[-1] == "requeued"


def test_long_step_is_aborted_before_the_time_limit():
    assert ended("signal.signal(signal.SIGTERM, signal.SIG_IGN)", seconds=1) == (255, ["requeued"])


def test_only_a_second_ctrl_c_interrupts_the_step():
    with _stop_flag() as stop:
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGINT):
            signal.raise_signal(number)
        assert len(stop) == 3
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize(
    ("processes", "most", "nodes", "tasks"), [(1, 8, 1, 1), (4, 8, 1, 4), (16, 8, 2, 8), (9, 3, 3, 3)]
)
def test_each_process_of_a_run_is_a_task(processes, most, nodes, tasks):
    words = slurm.job_words(OmegaConf.create({"tasks_per_node": most}), processes)
    assert words == [f"hydra.launcher.nodes={nodes}", f"hydra.launcher.tasks_per_node={tasks}"]


def test_jobs_missing_from_the_queue_twice_are_over(tmp_path, monkeypatch):
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

    slurm.wait_for_the_others(RuntimeError("Job (task=0) failed during processing with trace"), tmp_path, pause)
    assert next(answers, "all used") == "all used"


def test_jobs_that_sbatch_refuses_are_a_users_mistake(tmp_path):
    with pytest.raises(UserError, match=r"^SLURM refused the jobs \(Invalid account\)"):
        try:
            CommandFunction([sys.executable, "-c", "import sys; sys.exit('sbatch: error: Invalid account')"], False)()
        except FailedJobError as error:
            slurm.wait_for_the_others(error, tmp_path)


def test_processes_that_cannot_be_split_evenly_are_refused():
    with pytest.raises(UserError, match="9 processes cannot be split evenly"):
        slurm.job_words(OmegaConf.create({"tasks_per_node": 8}), 9)
