"""Runs the cells of a sweep as SLURM jobs through submitit: the tasks of a job, and how it reacts to USR2.

SLURM sends USR2 before the time limit. submitit's handler then saves the function to be called again, and requeues the
job. Here the run first finishes its step and saves a checkpoint.
"""

import math
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from omegaconf import DictConfig

from groupwise.errors import INTERRUPTED, UserError
from groupwise.processes.environment import interrupt_on

T = TypeVar("T")
LAUNCHER = "SlurmLauncher"
"""The class of hydra-submitit-launcher."""


def job_words(launcher: DictConfig, processes: int) -> list[str]:
    """Overrides of Hydra's launcher for cells with `processes` processes, on as few nodes as its settings allow.

    Raises `UserError` if the processes cannot be split evenly.
    """
    most = launcher.tasks_per_node
    nodes = math.ceil(processes / max(1, most))
    if processes % nodes:
        raise UserError(
            f"{processes} processes cannot be split evenly at hydra.launcher.tasks_per_node={most}: give a divisor."
        )
    return [f"hydra.launcher.nodes={nodes}", f"hydra.launcher.tasks_per_node={processes // nodes}"]


def wait_for_the_others(error: Exception, folder: Path, pause: Callable[[float], None] = time.sleep) -> None:
    """After an error of submitit, wait until no job of the sweep is in SLURM's queue.

    submitit raises an error if a job has no result, even if SLURM requeues the job. Such a job may be missing from the
    queue for a moment, so it counts as ended only after it was missing twice in a row.

    Raises:
        UserError: sbatch refused the jobs.
    """
    if isinstance(error.__cause__, subprocess.CalledProcessError):
        last = str(error).strip().splitlines()[-1].removeprefix("sbatch: error: ")
        raise UserError(f"SLURM refused the jobs ({last}): correct the hydra.launcher.* settings.") from error
    waiting, missing = {path.name for path in folder.glob("logs/*") if path.is_dir()}, set[str]()
    while waiting:
        pause(10.0)
        queue = ["squeue", "--me", "--noheader", "--array", "--format=%i"]
        done = subprocess.run(queue, capture_output=True, text=True)
        if done.returncode == 0:
            gone = waiting - set(done.stdout.split())
            waiting -= gone & missing
            missing = gone


def link_log(link: Path) -> None:
    """Make ``link`` a symbolic link to this job's log; only the job's main task does so."""
    import submitit

    job = submitit.JobEnvironment()
    if job.global_rank == 0:
        link.parent.mkdir(parents=True, exist_ok=True)
        link.unlink(missing_ok=True)
        log = job.paths.stdout.absolute()
        link.symlink_to(log.relative_to(link.parent.absolute()) if log.is_relative_to(link.parent.absolute()) else log)


MARGIN = 0.25
"""The share of the time between USR2 and the time limit that is reserved for requeueing."""


def in_job(work: Callable[[T], Any], seconds: float) -> Callable[[T], Any]:
    """Make ``work`` a task of a job: USR2 and SIGTERM stop it like Ctrl-C, and after USR2 submitit requeues it.

    Args:
        seconds: between USR2 and the time limit. A run that has not exited after this time, less `MARGIN`, is requeued
            and resumes from its previous checkpoint.
    """

    def run(given: T) -> Any:
        requeue: Any = signal.getsignal(signal.SIGUSR2)  # submitit's handler, which acts only in the job's main task
        warned = False

        def put_back(*_: object) -> None:
            requeue(signal.SIGUSR2, None)
            raise SystemExit(INTERRUPTED)

        def warn(*_: object) -> None:
            nonlocal warned
            if not warned:
                warned = True
                signal.alarm(max(1, round(seconds * (1 - MARGIN))))
                signal.raise_signal(signal.SIGTERM)

        interrupt_on(signal.SIGTERM)  # until the run sets its own handler
        signal.signal(signal.SIGALRM, put_back)
        signal.signal(signal.SIGUSR2, warn)
        try:
            return work(given)
        except KeyboardInterrupt:
            print("interrupted: the job can resume from its last checkpoint", flush=True)
            if warned:
                put_back()
            raise SystemExit(INTERRUPTED) from None
        finally:
            signal.alarm(0)

    return run
