"""Runs a sweep's cells as jobs of SLURM: tasks, time limit, preemption, and what came of each."""

import math
import os
import pickle
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from groupwise.errors import INTERRUPTED, ProcessFailed, UserError
from groupwise.processes.environment import interrupt_on

LATE = 20.0
"""Seconds that a file of a job may take to be seen from here, on a shared file system."""
GENERAL = {"timeout_min", "cpus_per_task", "gpus_per_node", "mem_gb", "name", "stderr_to_stdout"}
"""Parameters that submitit has for all clusters; it wants the others with SLURM's name before them."""
OURS = {"submitit_folder", "max_num_timeout", "tasks_per_node", "nodes", "additional_parameters"}


def require_slurm() -> None:
    """Raises `UserError` where SLURM's commands are not."""
    missing = [command for command in ("sbatch", "srun", "squeue") if shutil.which(command) is None]
    if missing:
        raise UserError(
            f"hydra/launcher=slurm needs {' and '.join(missing)}: give the command on a machine that submits to a "
            "cluster, or leave hydra/launcher out."
        )


def shape(processes: int, most: int) -> tuple[int, int]:
    """Nodes, and tasks on each, of a run of so many processes with at most `most` on a node.

    Raises:
        UserError: they cannot be shared out evenly.
    """
    nodes = math.ceil(processes / max(1, most))
    if processes % nodes:
        raise UserError(
            f"{processes} processes do not share out evenly at hydra.launcher.tasks_per_node={most}: give a number "
            f"that divides {processes}."
        )
    return nodes, processes // nodes


def parameters(given: Mapping[str, Any], processes: int) -> dict[str, Any]:
    """The launcher's settings as submitit takes them, for cells of so many processes."""
    nodes, tasks = shape(processes, given["tasks_per_node"])
    found = {key if key in GENERAL else f"slurm_{key}": value for key, value in given.items() if key not in OURS}
    return found | {
        "nodes": nodes,
        "tasks_per_node": tasks,
        "slurm_teardown": put_back(given["max_num_timeout"]),
        "slurm_additional_parameters": {"requeue": True, **(given.get("additional_parameters") or {})},
    }


def in_queue() -> set[str] | None:
    """The jobs of this user that are not over, tasks of arrays one by one ("12_3"); None if SLURM does not answer."""
    try:
        done = subprocess.run(
            ["squeue", "--me", "--noheader", "--array", "--format=%i"], capture_output=True, text=True, timeout=120
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return set(done.stdout.split()) if done.returncode == 0 else None


def wait_for(
    jobs: Iterable[str], alive: Callable[[], set[str] | None] = in_queue, pause: Callable[[float], None] = time.sleep
) -> None:
    """Until none of the jobs is in the queue any more, asking every two seconds at first and every half minute later.

    A job that is put back may be missing for a moment, so it is over when it was missing twice in a row.
    """
    waiting, missing, wait = set(jobs), set[str](), 2.0
    while waiting:
        pause(wait)
        wait = min(30.0, wait * 1.1)
        found = alive()
        if found is not None:
            gone = waiting - found
            waiting -= gone & missing
            missing = gone


def outcome_of(job: str, result: Path, log: Path) -> Any:
    """What the main task of a job that is over has returned.

    Raises:
        ProcessFailed: it failed, or left nothing: it was cancelled, or killed too often.
    """
    deadline = time.monotonic() + LATE
    while not result.is_file() and time.monotonic() < deadline and _state(job) in ("COMPLETED", "FAILED", "unknown"):
        time.sleep(1)
    if not result.is_file():
        raise ProcessFailed(f"job {job} ended without a result (state {_state(job)}): see {log}")
    with open(result, "rb") as file:
        kind, value = pickle.load(file)  # noqa: S301 (written by this sweep's own job, as submitit does)
    if kind != "success":
        raise ProcessFailed(f"job {job} failed ({str(value).strip().splitlines()[-1]}): see {log}")
    return value


def _state(job: str) -> str:
    """As SLURM's accounts have it; "unknown" on a cluster that keeps none."""
    command = ["sacct", "--jobs", job, "--allocations", "--noheader", "--parsable2", "--format=State"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return (done.stdout.split() or ["unknown"])[0]


MARGIN = 0.25
"""Share of the time between the warning and the limit that is kept for leaving and for the batch script."""


def heed_warnings(seconds: float) -> None:
    """From now on, in this process: stop on USR2 and SIGTERM as on Ctrl-C, and in time.

    Args:
        seconds: between the warning and the end. A run that has not left by then, less `MARGIN`, is ended as it is,
            so that the job is put back rather than lost: it then goes on from the checkpoint before.
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


def in_job(work: Callable[[], Any], seconds: float) -> Any:
    """Do the work of a task of a job; where it is interrupted, leave with the exit code that puts the job back."""
    heed_warnings(seconds)
    try:
        return work()
    except KeyboardInterrupt:
        job = os.environ.get("SLURM_JOB_ID", "")
        print(f"interrupted: job {job} can go on from its last checkpoint", flush=True)
        raise SystemExit(INTERRUPTED) from None
    finally:
        signal.alarm(0)


def put_back(restarts: int) -> list[str]:
    """Lines of the batch script after srun's, for bash. A task of an array is named so: the array's number means all.

    Args:
        restarts: how often a job may start again in all, whoever put it back.
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
