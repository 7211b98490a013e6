"""Runs one cell of a sweep, in the process that the launcher gave it."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from groupwise.config.compose import to_run_config
from groupwise.config.identity import config_hash
from groupwise.config.schema import RunConfig
from groupwise.errors import UserError, report
from groupwise.sweeps.folder import CELLS, clear_failure, name_of, write_failure


def run_cell(composed: DictConfig, train: Callable[[RunConfig], Any]) -> Any:
    """Train it; a failure is told, kept in the sweep's folder and raised, so that Hydra or the cluster knows."""
    settings = HydraConfig.get()
    folder = Path(settings.sweep.dir)
    key, name, log = f"job-{settings.job.num}", told_overrides(), None
    os.environ.setdefault("WANDB_RUN_GROUP", settings.runtime.choices.get("sweep") or folder.name)
    try:
        try:
            config = to_run_config(composed)
        except UserError as error:  # the machine lacks something that the one that checked it had
            report(error)
            raise
        if config.tuning.name != "off":
            raise UserError(
                "tuning=accounted draws from the cells of a grid, and this sweep chooses its own: leave it out."
            )
        key = config_hash(config)[:12]
        name = name_of(folder, key) or name
        if config.overwrite and _begun_here(folder, Path(config.paths.results).expanduser() / "runs" / key):
            config.overwrite = False
        launcher = settings.launcher._target_.rpartition(".")[2]
        if launcher != "BasicLauncher":
            log = folder / "logs" / f"{key}.log"
        with _to_file(log if launcher == "JoblibLauncher" else None, name):
            try:
                value = train(config)
            except Exception as error:
                report(error)
                raise
    except Exception as error:
        write_failure(folder, key, name, error, log)
        raise
    clear_failure(folder, key)
    return value


def _begun_here(folder: Path, run: Path) -> bool:
    """Has this sweep begun the run already? A job that is put back goes on then, whatever the user overwrites."""
    written, submitted = run / "config.yaml", folder / CELLS
    return written.is_file() and submitted.is_file() and written.stat().st_mtime > submitted.stat().st_mtime


def told_overrides() -> str:
    """What the cell was given. Unresolved: an override may hold an interpolation, and that may be what failed."""
    given = OmegaConf.to_container(HydraConfig.get().overrides.task, resolve=False)
    return " ".join(given)  # type: ignore[arg-type]


@contextmanager
def output_to(log: Path) -> Iterator[None]:
    """Send all that this process and its children print to the end of `log`."""
    log.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush(), sys.stderr.flush()
    before = [os.dup(number) for number in (1, 2)]
    try:
        with open(log, "a", buffering=1, encoding="utf-8") as file, redirect_stdout(file), redirect_stderr(file):
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
            yield
    finally:
        for number, old in zip((1, 2), before, strict=True):
            os.dup2(old, number)
            os.close(old)


@contextmanager
def _to_file(log: Path | None, cell: str) -> Iterator[None]:
    """Send all output to `log`, and one line at the end to the terminal."""
    if log is None:
        yield
        return
    began, outcome = time.monotonic(), "failed"
    try:
        with output_to(log):
            yield
        outcome = "done"
    finally:
        print(f"{outcome} in {time.monotonic() - began:.0f} s: {cell}", flush=True)
