"""A sweep's cells as jobs of SLURM: how many tasks each takes, when its job is over, and what came of it."""

from __future__ import annotations

import math
import pickle
import shutil
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from groupwise.errors import ProcessFailed, UserError
from groupwise.launch.preemption import put_back

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
    jobs: Iterable[str],
    alive: Callable[[], set[str] | None] = in_queue,
    pause: Callable[[float], None] = time.sleep,
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
