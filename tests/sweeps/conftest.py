"""A separate checkout for tests of sweeps, with a stub for training that writes a row, waits or fails."""

import contextlib
import io
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from groupwise.sweeps import status
from tests.forks import Command

ROOT = Path(__file__).parents[2]
SWEEP = """
# A table of two modes.
#   python run.py -m +sweep=table
grids:
  - {task: cifar, clip: [flat, fixed_layer], privacy.epsilon: [3, 8], seed: [0, 1]}
  - {task: cifar, clip: [flat, ghost], privacy.epsilon: 8, seed: 1}   # flat is repeated
scales:
  smoke:
    privacy.epsilon: {3: 4}
    clip: {ghost: null}
"""
START = """
import json, os, time
from pathlib import Path

from groupwise.errors import UserError
from groupwise.training.provenance import git_state
from groupwise.config.identity import config_hash, flat_config
from groupwise.version import VERSION


def start(config):
    if config.seed == 1 and config.clip.name == "flat" and Path("fail").exists():
        raise UserError("no data: bring some.") if config.privacy.epsilon == 8 else RuntimeError("a bug")
    print("ran", config.clip.name, config.privacy.epsilon, config.seed, VERSION, flush=True)
    folder = Path(config.paths.results) / "runs" / config_hash(config)[:12]
    folder.mkdir(parents=True, exist_ok=True)
    if config.overwrite:
        (folder / "DONE").unlink(missing_ok=True)
        print("overwrites", flush=True)
    if Path("wait").exists():
        Path("first").touch()
        while Path("wait").exists():
            time.sleep(0.05)
    (folder / "config.yaml").write_text("")
    if Path("kill").exists() and config.seed == 1:
        Path("kill").unlink()
        os.kill(os.getpid(), 9)
    row = {"hash": config_hash(config), **flat_config(config), "valid/accuracy": 50.0 + config.seed}
    row |= {"system.wall_seconds": 60.0, "git.sha": git_state()["sha"], "group": os.environ["WANDB_RUN_GROUP"]}
    (folder / "result.json").write_text(json.dumps(row))
    lines = [{"step": 1, "nonprivate/loss": 2.0}, {"step": 2, "seconds": 1.5, "valid/accuracy": 50.0}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\\n" for line in lines))
    (folder / "DONE").touch()
    return row
"""


class Checkout:
    """A copy of `run.py`, its code and configuration, with the sweep `table`; commands run in this folder."""

    def __init__(self, root: Path) -> None:
        self.root = root
        shutil.copytree(ROOT / "src", root / "src")  # with its compiled bytecode
        shutil.copytree(ROOT / "conf", root / "conf", ignore=shutil.ignore_patterns("sweep"))
        shutil.copy(ROOT / "run.py", root)
        (root / "sweeps").mkdir()
        (root / "conf" / "sweep").symlink_to("../sweeps")
        (root / "sweeps" / "table.yaml").write_text(SWEEP.lstrip())
        (root / "src/groupwise/processes/start.py").write_text(START)
        (root / "src/groupwise/version.py").write_text("VERSION = 'old'\n")

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, "PYTHONPATH": str(self.root / "src"), "PYTHONDONTWRITEBYTECODE": "1"}

    def start(self, *arguments: str) -> Command:
        return Command(*arguments, cwd=self.root, environment=self.environment)

    def unforked(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run in a new Python, as a fork would wait for the workers of joblib at its end."""
        given = [sys.executable, *arguments]
        return subprocess.run(given, cwd=self.root, env=self.environment, capture_output=True, text=True)

    def command(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(arguments, *self.start(*arguments).finish())

    def sweep(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return self.command("run.py", "-m", "+sweep=table", "scale=smoke", *arguments)

    def status(self, *arguments: str) -> str:
        """The output of `python -m groupwise.sweeps.status` in this folder."""
        with contextlib.chdir(self.root), contextlib.redirect_stdout(io.StringIO()) as output:
            assert status.main(arguments) == 0
        return output.getvalue()

    def write_sweep(self, text: str) -> None:
        (self.root / "sweeps" / "table.yaml").write_text(textwrap.dedent(text))

    @property
    def folder(self) -> Path:
        """The folder of the last sweep."""
        return sorted((self.root / "results" / "sweeps").iterdir())[-1]


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)
