"""Starts sweeps on the one-node cluster of scripts/slurm, and inspects or kills their jobs."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

ROOT = Path(__file__).resolve().parents[2]
UP = "SLURM_ONE" in os.environ and subprocess.run(["sinfo"], capture_output=True).returncode == 0
WHY_NOT = "needs the one-node cluster of scripts/slurm: make test-slurm"


def slurm(*command: str) -> str:
    """The output of a SLURM command."""
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=600).stdout


def until(true: Callable[[], Any], what: str, seconds: float = 900) -> Any:
    """Wait until `true()` is true, and return its value."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if found := true():
            return found
        time.sleep(0.2)
    raise TimeoutError(f"not within {seconds:g} s: {what}")


def start(results: Path, *overrides: str) -> subprocess.Popen[str]:
    """Start `run.py -m` in the checkout."""
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "run.py", "-m", f"paths.results={results}", "debug.noise_seed=1", *overrides]
    return subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True)


def finish(sweep: subprocess.Popen[str], seconds: float = 900) -> str:
    """Wait for a sweep that succeeds; returns its stderr."""
    _, errors = sweep.communicate(timeout=seconds)
    assert sweep.returncode == 0, errors
    return errors


class Cell:
    """A cell that runs on the cluster: its job, its processes and its run's folder."""

    def __init__(self, sweep: Path, listed: dict[str, Any]) -> None:
        self.hash, self.run = listed["hash"][:12], Path(listed["run"])
        self._log = sweep / "logs" / f"{self.hash}.log"

    @property
    def job(self) -> str:
        """The job id of SLURM, such as 7_3."""
        return until(self._log.is_symlink, "submitted") and self._log.resolve().parent.name

    @property
    def log(self) -> str:
        return self._log.read_text()

    @property
    def shown(self) -> dict[str, str]:
        """The fields of `scontrol show job`."""
        return dict(
            part.split("=", 1) for part in slurm("scontrol", "show", "job", "-o", self.job).split() if "=" in part
        )

    @property
    def step(self) -> str:
        """The id of the job step. A signal to the job itself would be sent repeatedly while other tasks wait."""
        return f"{self.shown['JobId']}.0"

    @property
    def steps(self) -> int:
        """The number of lines in metrics.jsonl."""
        file = self.run / "metrics.jsonl"
        return len(file.read_text().splitlines()) if file.is_file() else 0

    @property
    def minutes(self) -> int:
        """The run time so far in minutes, rounded."""
        hours, minutes, seconds = map(int, self.shown["RunTime"].split(":"))
        return 60 * hours + minutes + (seconds >= 30)

    @property
    def restarts(self) -> int:
        return int(self.shown["Restarts"])

    def under_way(self, steps: int = 20) -> Self:
        """Wait until it has trained for this many steps."""
        until(lambda: self.steps >= steps, f"{self.job} trains")
        return self

    def processes(self) -> dict[int, int]:
        """Task -> process id."""
        ours = _processes(f"SLURM_JOB_ID={self.shown['JobId']}")
        return {
            int(given["SLURM_PROCID"]): number
            for number, (command, given) in ours.items()
            if "submitit.core._submit" in command and not command.startswith("srun")
        }

    def lose_node(self) -> None:
        """Kill all processes of the job, and the SLURM daemon of its node."""
        job = self.shown["JobId"]
        daemons = [number for number, (command, _) in _processes("").items() if f"slurmstepd: [{job}." in command]
        daemon = int((Path(os.environ["SLURM_ONE"]) / "run" / "slurmd.pid").read_text())
        for number in (daemon, *daemons, *_processes(f"SLURM_JOB_ID={job}")):
            with suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)


def _processes(marked: str) -> dict[int, tuple[str, dict[str, str]]]:
    """Process id -> command line and environment, of processes that have `marked` in their environment."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            given = (folder / "environ").read_bytes().decode(errors="replace").split("\0")
            command = (folder / "cmdline").read_bytes().decode(errors="replace")
        except OSError:
            continue
        if not marked or marked in given:
            found[int(folder.name)] = (command, dict(line.split("=", 1) for line in given if "=" in line))
    return found


def cells_of(results: Path, sweep: subprocess.Popen[str]) -> list[Cell]:
    """The cells of the only sweep in the results folder, in order."""
    until(lambda: any(results.glob("sweeps/*/logs/*.log")) or sweep.poll() is not None, "submitted")
    if sweep.returncode is not None:
        raise AssertionError(sweep.communicate()[1])
    listed = next(results.glob("sweeps/*/cells.json"))
    return [Cell(listed.parent, cell) for cell in json.loads(listed.read_text())["cells"]]
