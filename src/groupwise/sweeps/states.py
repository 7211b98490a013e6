"""Reads the state of each cell of a sweep from its run's folder, the sweep's folder and SLURM's queue."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from groupwise.sweeps.folder import is_done

DONE, RUNNING, FAILED, INTERRUPTED, WAITING = STATES = ("done", "running", "failed", "interrupted", "waiting")


@dataclass(frozen=True)
class State:
    """One cell."""

    name: str
    kind: str
    """A name of `STATES`; interrupted: begun, and nobody is at it."""
    note: str = ""
    """Failed: the reason; running: the step."""
    seconds: float | None = None
    """Done: what its training took."""
    left: float | None = None
    """Running: the share of its steps that is left."""
    elapsed: float = 0.0
    """Running: seconds since it began, or went on."""


def cell_states(folder: Path, cells: list[dict[str, Any]]) -> list[State]:
    """Where all cells of the sweep in `folder` are."""
    jobs, locks = _jobs(folder), _local_locks()
    return [_state(folder, cell, jobs.get(cell["hash"][:12]), locks) for cell in cells]


def _state(folder: Path, cell: dict[str, Any], job: str | None, locks: set[int] | None) -> State:
    name, run = cell["name"], Path(cell["run"])
    if is_done(folder, cell):
        return State(name, DONE, seconds=_number(run / "result.json", "system.wall_seconds"))
    if job == "RUNNING" or _locked(run / ".lock", locks):
        return _running(name, run)
    if job is not None:
        return State(name, WAITING, note=f"SLURM: {job.lower()}")
    failure = folder / "failed" / f"{cell['hash'][:12]}.txt"
    if failure.is_file():
        return State(name, FAILED, note=failure.read_text(encoding="utf-8").split("\n")[0])
    return State(name, INTERRUPTED if (run / "config.hash").is_file() else WAITING)


def _running(name: str, run: Path) -> State:
    try:
        with open(run / "metrics.jsonl", "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 65536))
            step = int(json.loads(file.read().split(b"\n")[-2])["step"])
        steps = int(json.loads((run / "privacy.json").read_text(encoding="utf-8"))["plan"]["steps"])
    except (OSError, ValueError, KeyError, IndexError):
        return State(name, RUNNING, note="starting", left=1.0)
    elapsed = time.time() - (run / "git.json").stat().st_mtime
    return State(name, RUNNING, note=f"step {step} of {steps}", left=1 - step / max(steps, 1), elapsed=elapsed)


def _local_locks() -> set[int] | None:
    """Inodes of all files that this machine's processes hold locks on; None where the system does not tell."""
    try:
        lines = Path("/proc/locks").read_text().splitlines()
        return {int(line.split(" ")[-3].rpartition(":")[2]) for line in lines}
    except (OSError, ValueError, IndexError):
        return None


def _locked(path: Path, locks: set[int] | None) -> bool:
    """Does a process hold that lock? Asked of the system, as taking it, even for a moment, may turn a run away."""
    try:
        inode = path.stat().st_ino
    except OSError:
        return False
    if locks is not None:
        return inode in locks
    try:
        with open(path, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def _jobs(folder: Path) -> dict[str, str]:
    """Hash -> state of its job, of those that are in SLURM's queue; ``logs/<hash>.log`` leads to ``logs/<job>/``."""
    numbers = {link.stem: link.resolve().parent.name for link in (folder / "logs").glob("*.log") if link.is_symlink()}
    if not numbers or shutil.which("squeue") is None:
        return {}
    try:
        asked = subprocess.run(["squeue", "-h", "-r", "-o", "%i %T"], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return {}
    queued = dict(line.split(" ", 1) for line in asked.stdout.splitlines() if " " in line)
    return {key: queued[number] for key, number in numbers.items() if number in queued}


def _number(path: Path, key: str) -> float | None:
    try:
        return float(json.loads(path.read_text(encoding="utf-8"))[key])
    except (OSError, ValueError, KeyError, TypeError):
        return None
