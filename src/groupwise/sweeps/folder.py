"""A sweep's folder, `results/sweeps/<time>-<name>`, with its cells and failures, and the function that runs a cell."""

import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from groupwise.atomic import write_json, write_text
from groupwise.config.checks import validate
from groupwise.config.compose import register, to_run_config
from groupwise.config.identity import config_hash, load_config, save_config
from groupwise.config.schema import RunConfig
from groupwise.errors import ProcessFailed, UserError, exit_code, report
from groupwise.sweeps import slurm
from groupwise.sweeps.prepare import PlannedSweep

CELLS = "cells.json"


def begin_sweep(planned: PlannedSweep) -> Path:
    """Make the folder and list the cells in it; returns it, with a number added if the name is taken.

    Raises `UserError` if it cannot be written.
    """
    folder, number = planned.folder, 1
    try:
        while True:
            try:
                (folder / "cells").mkdir(parents=True)
                break
            except FileExistsError:  # another sweep began in the same second
                number += 1
                folder = planned.folder.with_name(f"{planned.folder.name}-{number}")
        if planned.cells is not None:
            for cell in planned.cells:
                write_text(cell_file(folder, cell.hash[:12]), save_config(cell.config))
            listed = [
                {"name": cell.name, "overrides": list(cell.overrides)}
                | {"hash": cell.hash, "run": str(cell.run), "done_before": cell.done}
                for cell in planned.cells
            ]
            write_json(folder / CELLS, {"sweep": planned.name, "scale": planned.scale, "cells": listed})
    except OSError as error:
        raise UserError(
            f"the sweep's folder {folder} cannot be written ({error.strerror}): give another paths.results=FOLDER."
        ) from error
    return folder


def cell_file(folder: Path, key: str) -> Path:
    """The file with the configuration of a cell, by 12 digits of its hash."""
    return folder / "cells" / f"{key}.yaml"


def read_cells(folder: Path) -> list[dict[str, Any]]:
    """The cells of a sweep, as `begin_sweep` wrote them; raises `UserError` if this is not a sweep's folder."""
    try:
        return json.loads((folder / CELLS).read_text(encoding="utf-8"))["cells"]
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"{folder} is not a sweep's folder: give one of results/sweeps.") from error


def _cells(folder: Path) -> dict[str, dict[str, Any]]:
    """12 digits of the hash -> cell; empty if a sweeper such as Optuna chooses the cells."""
    return {cell["hash"][:12]: cell for cell in read_cells(folder)} if (folder / CELLS).is_file() else {}


@dataclass(frozen=True)
class Failure:
    """Why a cell failed."""

    cell: str
    kind: str
    """The name of the exception."""
    file: Path


def write_failure(folder: Path, key: str, cell: str, error: Exception, log: Path | None) -> None:
    """Write the message of a mistake, or the traceback of another exception, to ``failed/<key>.txt``."""
    expected = isinstance(error, UserError | ProcessFailed)
    lines = [f"{type(error).__name__}: {' '.join(str(error).split())}", f"cell: {cell}"]
    lines += [] if log is None else [f"log: {log}"]
    if not expected:
        lines += ["", "".join(traceback.format_exception(error)).rstrip()]
    (folder / "failed").mkdir(parents=True, exist_ok=True)
    write_text(folder / "failed" / f"{key}.txt", "\n".join(lines) + "\n")


def failures(folder: Path) -> list[Failure]:
    """The failures of cells that have not succeeded in a later attempt, in the order of the cells."""
    found = {}
    for file in sorted((folder / "failed").glob("*.txt")):
        first, second, *_ = [*file.read_text(encoding="utf-8").splitlines(), "", ""]
        found[file.stem] = Failure(second.removeprefix("cell: "), first.split(":")[0], file)
    return [found[key] for key in dict.fromkeys([*_cells(folder), *found]) if key in found]


def unfinished(folder: Path) -> list[dict[str, Any]]:
    """The cells that are neither done nor failed: they were killed, or are still running."""
    failed = {failure.file.stem for failure in failures(folder)}
    return [cell for key, cell in _cells(folder).items() if key not in failed and not is_done(folder, cell)]


def is_done(folder: Path, cell: dict[str, Any]) -> bool:
    """Whether the run of a cell is done; with overwrite=true, an earlier run does not count."""
    done, submitted = Path(cell["run"]) / "DONE", folder / CELLS
    return done.is_file() and (cell["done_before"] or done.stat().st_mtime >= submitted.stat().st_mtime)


def report_sweep(folder: Path, crash: Exception | None = None) -> int:
    """List the failed cells on stderr; returns the exit code.

    If the launcher failed (`crash` is its exception), cells without a result count as failed too. The exit code is 0 if
    it failed before any cell began, as `crash` is then the only error.
    """
    failed = failures(folder)
    lost = [] if crash is None else unfinished(folder)
    cells = _cells(folder)
    waiting = sum(not cell["done_before"] for cell in cells.values())
    began = len(lost) < waiting or any(path.is_dir() or path.suffix == ".log" for path in folder.glob("logs/*"))
    if crash is not None and not failed and not began:
        return 0
    if failed or lost:
        print(f"{len(failed) + len(lost)} of {len(cells) or 'the'} cells failed:", file=sys.stderr)
    for failure in failed:
        name = cells.get(failure.file.stem, {}).get("name", failure.cell)
        print(f"  {name}: {failure.kind} ({failure.file})", file=sys.stderr)
    for cell in lost:
        print(f"  {cell['name']}: killed, or never started ({type(crash).__name__})", file=sys.stderr)
    return exit_code([failure.kind for failure in failed] + [type(crash).__name__ for _ in lost])


def run_cell(composed: DictConfig, train: Callable[[RunConfig], Any]) -> Any:
    """Train a cell. A failure is printed and kept in the sweep's folder; it is raised if a sweeper chose the cell."""
    register()  # this may be another process than the one that composed
    settings = HydraConfig.get()
    folder = Path(settings.sweep.dir)
    typed: Any = OmegaConf.to_container(settings.overrides.task)  # not resolved, because they may contain the mistake
    key, name, log = f"job-{settings.job.num}", " ".join(typed), None
    os.environ.setdefault("WANDB_RUN_GROUP", settings.runtime.choices.get("sweep") or folder.name)
    try:
        try:
            config = to_run_config(composed) if composed.cell is None else load_config(cell_file(folder, composed.cell))
            validate(config)
        except UserError as error:  # a mistake that shows only on this machine
            report(error)
            raise
        key = config_hash(config)[:12]
        name = _cells(folder).get(key, {}).get("name", name)
        if config.overwrite and _begun_here(folder, Path(config.paths.results).expanduser() / "runs" / key):
            config.overwrite = False
        launcher = settings.launcher._target_.rpartition(".")[2]
        if launcher != "BasicLauncher":
            log = folder / "logs" / f"{key}.log"
        if launcher == slurm.LAUNCHER:
            slurm.link_log(folder / "logs" / f"{key}.log")
            train = slurm.in_job(train, settings.launcher.signal_delay_s)
        with _to_file(log if launcher == "JoblibLauncher" else None, name):
            try:
                value = train(config)
            except Exception as error:
                report(error)
                raise
    except Exception as error:
        write_failure(folder, key, name, error, log)
        if composed.cell is None:
            raise
        return None
    (folder / "failed" / f"{key}.txt").unlink(missing_ok=True)  # of an earlier attempt
    return value


def _begun_here(folder: Path, run: Path) -> bool:
    """Whether this sweep has already begun the run; if so, a requeued job resumes it, even with overwrite=true."""
    written, submitted = run / "config.yaml", folder / CELLS
    return written.is_file() and submitted.is_file() and written.stat().st_mtime > submitted.stat().st_mtime


@contextmanager
def _to_file(log: Path | None, cell: str) -> Iterator[None]:
    """Redirect the output of this process and its children to `log`; print one line at the end."""
    if log is None:
        yield
        return
    began, outcome = time.monotonic(), "failed"
    log.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush(), sys.stderr.flush()
    before = [os.dup(number) for number in (1, 2)]
    try:
        with open(log, "a", buffering=1, encoding="utf-8") as file, redirect_stdout(file), redirect_stderr(file):
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
            yield
        outcome = "done"
    finally:
        for number, old in zip((1, 2), before, strict=True):
            os.dup2(old, number)
            os.close(old)
        print(f"{outcome} in {time.monotonic() - began:.0f} s: {cell}", flush=True)
