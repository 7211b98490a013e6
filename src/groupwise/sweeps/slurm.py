"""Runs a sweep's cells as SLURM jobs: tasks, time limit, preemption and requeueing."""

import math
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from omegaconf import DictConfig

from groupwise.atomic import write_text
from groupwise.errors import INTERRUPTED, UserError
from groupwise.processes.environment import interrupt_on

T = TypeVar("T")
LAUNCHER = "SlurmLauncher"
"""The class of hydra-submitit-launcher."""
PUT_BACK = "put_back.sh"


def require_slurm() -> None:
    """Raises `UserError` if SLURM's commands are missing."""
    missing = [command for command in ("sbatch", "srun", "squeue") if shutil.which(command) is None]
    if missing:
        raise UserError(
            f"hydra/launcher=slurm needs {' and '.join(missing)}: give the command on a machine that submits to a "
            "cluster, or leave hydra/launcher out."
        )


def shape(processes: int, most: int) -> tuple[int, int]:
    """The number of nodes, and of tasks on each, for a run of this many processes with at most `most` on a node.

    Raises:
        UserError: they cannot be split evenly.
    """
    nodes = math.ceil(processes / max(1, most))
    if processes % nodes:
        raise UserError(
            f"{processes} processes cannot be split evenly at hydra.launcher.tasks_per_node={most}: give a divisor of "
            f"{processes}."
        )
    return nodes, processes // nodes


def job_words(folder: Path, launcher: DictConfig, processes: int) -> list[str]:
    """Overrides of Hydra's launcher for cells with this many processes; their batch scripts end with `put_back`."""
    require_slurm()
    nodes, tasks = shape(processes, launcher.tasks_per_node)
    script = folder.resolve() / PUT_BACK
    write_text(script, "\n".join(put_back(launcher.max_num_timeout)))
    return [
        f"hydra.launcher.nodes={nodes}",
        f"hydra.launcher.tasks_per_node={tasks}",
        f"+hydra.launcher.teardown=[\"source '{script}'\"]",
    ]


def wait_for_the_others(error: Exception, folder: Path, pause: Callable[[float], None] = time.sleep) -> None:
    """After submitit's error ended Hydra's launcher, wait until no job of the sweep is in SLURM's queue.

    submitit fails if a job has no result, even if SLURM requeues the job. Such a job may be missing from the queue for
    a moment, so it counts as over once it was missing twice in a row.

    Raises:
        UserError: SLURM accepted no jobs.
    """
    if "has not produced any output" not in str(error):
        last = str(error).strip().splitlines()[-1].removeprefix("sbatch: error: ")
        raise UserError(f"SLURM refused the jobs ({last}): see what hydra.launcher.* says.") from error
    waiting, missing = {path.name for path in (folder / "logs").iterdir() if path.is_dir()}, set[str]()
    while waiting:
        pause(10.0)
        queue = ["squeue", "--me", "--noheader", "--array", "--format=%i"]
        done = subprocess.run(queue, capture_output=True, text=True)
        if done.returncode == 0:
            gone = waiting - set(done.stdout.split())
            waiting -= gone & missing
            missing = gone


def link_log(link: Path) -> None:
    """Link ``link`` to this job's log, in the job's main task."""
    import submitit

    job = submitit.JobEnvironment()
    if job.global_rank == 0:
        link.parent.mkdir(parents=True, exist_ok=True)
        link.unlink(missing_ok=True)
        log = job.paths.stdout.absolute()
        link.symlink_to(log.relative_to(link.parent.absolute()) if log.is_relative_to(link.parent.absolute()) else log)


MARGIN = 0.25
"""Share of the time between the warning and the limit that is reserved for exiting and for the batch script."""


def heed_warnings(seconds: float) -> None:
    """From now on, stop this process on USR2 and SIGTERM as on Ctrl-C, and in time.

    Args:
        seconds: between the warning and the end. A run that has not exited by then, less `MARGIN`, is ended, so that
            the job is requeued and not lost: it then resumes from its previous checkpoint.
    """
    interrupt_on(signal.SIGTERM)  # until the run has a handler of its own
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # ends the process, even inside of a long operation
    warned = False

    def warn(_: int, __: Any) -> None:
        nonlocal warned
        if not warned:
            warned = True
            signal.alarm(max(1, round(seconds * (1 - MARGIN))))
            signal.raise_signal(signal.SIGTERM)

    signal.signal(signal.SIGUSR2, warn)


def in_job(work: Callable[[T], Any], seconds: float) -> Callable[[T], Any]:
    """Run ``work`` as a task of a job: if interrupted, it exits with the code that requeues the job."""

    def run(given: T) -> Any:
        heed_warnings(seconds)
        try:
            return work(given)
        except KeyboardInterrupt:
            job = os.environ.get("SLURM_JOB_ID", "")
            print(f"interrupted: job {job} can go on from its last checkpoint", flush=True)
            raise SystemExit(INTERRUPTED) from None
        finally:
            signal.alarm(0)

    return run


def put_back(restarts: int) -> list[str]:
    """Lines of the batch script after srun, for bash. They name a single task, as an array's number means all tasks.

    Args:
        restarts: the total number of times that a job may restart, for whatever reason.
    """
    return [
        "code=$?",
        "job=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}",
        "job=${job:-$SLURM_JOB_ID}",
        'if [ "$code" -gt 128 ]; then',
        f'  if [ "${{SLURM_RESTART_COUNT:-0}}" -ge {restarts} ]; then',
        f'    echo "error: job $job was stopped (exit code $code) after {restarts} restarts, and stays as it is" >&2',
        "  else",
        '    echo "job $job was stopped (exit code $code) and goes back into the queue" >&2',
        '    for pause in 5 30 60; do scontrol requeue "$job" && break; sleep $pause; done',
        "  fi",
        "fi",
        "exit $code",
    ]
