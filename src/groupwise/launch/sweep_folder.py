"""A sweep's folder, `results/sweeps/<time>-<name>`: what was asked for, with which code, and what failed.

cells.json         the cells: name, seed, overrides, hash, the run's folder, and whether it was done before
cells/<hash>.yaml  the resolved configuration of each
code/              src, conf, sweeps and run.py as they were: what its jobs run (`snapshot`)
failed/<hash>.txt  why a cell failed; removed when it succeeds later
logs/<hash>.log    what a cell printed, where several run at once
"""

from __future__ import annotations

import json
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from groupwise.atomic import write_json, write_text
from groupwise.errors import ProcessFailed, UserError
from groupwise.launch.sweep import PlannedSweep
from groupwise.training.identity import save_config

CELLS = "cells.json"


def begin_sweep(planned: PlannedSweep) -> Path:
    """Make the folder and write what will run; returns it, with a number added where that name is taken.

    Raises:
        UserError: nothing can be written there.
    """
    folder, number = planned.folder, 1
    try:
        while (folder / CELLS).exists():
            number += 1
            folder = planned.folder.with_name(f"{planned.folder.name}-{number}")
        folder.mkdir(parents=True, exist_ok=True)
        if planned.cells is not None:
            (folder / "cells").mkdir(exist_ok=True)
            for cell in planned.cells:
                write_text(folder / "cells" / f"{cell.hash[:12]}.yaml", save_config(cell.config))
            listed = [
                {
                    "name": cell.name,
                    "seed": cell.seed,
                    "overrides": list(cell.overrides),
                    "hash": cell.hash,
                    "run": str(cell.run),
                    "done_before": cell.done,
                }
                for cell in planned.cells
            ]
            write_json(folder / CELLS, {"sweep": planned.name, "scale": planned.scale, "cells": listed})
    except OSError as error:
        raise UserError(
            f"the sweep's folder {folder} cannot be written ({error.strerror}): give another with paths.results=FOLDER."
        ) from error
    return folder


def read_cells(folder: Path) -> list[dict[str, Any]]:
    """The cells of a sweep, as `begin_sweep` wrote them.

    Raises:
        UserError: this is no sweep's folder.
    """
    try:
        return json.loads((folder / CELLS).read_text(encoding="utf-8"))["cells"]
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"{folder} is no sweep's folder: name one of results/sweeps.") from error


def name_of(folder: Path, key: str) -> str | None:
    """The name of the cell whose hash begins so; None where the folder does not know."""
    cells = read_cells(folder) if (folder / CELLS).is_file() else []
    return next((cell["name"] for cell in cells if cell["hash"].startswith(key)), None)


@dataclass(frozen=True)
class Failure:
    """Why a cell failed."""

    cell: str
    kind: str
    """The exception's name; a UserError is a mistake, all others are bugs."""
    file: Path


def write_failure(folder: Path, key: str, cell: str, error: Exception, log: Path | None) -> None:
    """Keep the sentence of a mistake, or the traceback of a bug, in ``failed/<key>.txt``."""
    told = isinstance(error, UserError | ProcessFailed)
    lines = [f"{type(error).__name__}: {' '.join(str(error).split())}", f"cell: {cell}"]
    lines += [] if log is None else [f"log: {log}"]
    if not told:
        lines += ["", "".join(traceback.format_exception(error)).rstrip()]
    (folder / "failed").mkdir(parents=True, exist_ok=True)
    write_text(folder / "failed" / f"{key}.txt", "\n".join(lines) + "\n")


def clear_failure(folder: Path, key: str) -> None:
    """The cell has succeeded after all."""
    (folder / "failed" / f"{key}.txt").unlink(missing_ok=True)


def failures(folder: Path) -> list[Failure]:
    """What failed and did not succeed since, in the order of the cells."""
    found = {}
    for file in sorted((folder / "failed").glob("*.txt")):
        first, second, *_ = [*file.read_text(encoding="utf-8").splitlines(), "", ""]
        found[file.stem] = Failure(second.removeprefix("cell: "), first.split(":")[0], file)
    order = [cell["hash"][:12] for cell in read_cells(folder)] if (folder / CELLS).is_file() else []
    return [found[key] for key in dict.fromkeys([*order, *found]) if key in found]


def unfinished(folder: Path) -> list[dict[str, Any]]:
    """The cells that are not done and say of no failure: killed, or still at it."""
    failed = {failure.file.stem for failure in failures(folder)}
    cells = read_cells(folder) if (folder / CELLS).is_file() else []
    return [cell for cell in cells if cell["hash"][:12] not in failed and not is_done(folder, cell)]


def is_done(folder: Path, cell: dict[str, Any]) -> bool:
    """Has its run `DONE`, and that from before only if the sweep was not asked to overwrite it?"""
    done, submitted = Path(cell["run"]) / "DONE", folder / CELLS
    return done.is_file() and (cell["done_before"] or done.stat().st_mtime >= submitted.stat().st_mtime)


def has_begun(folder: Path, cell: dict[str, Any]) -> bool:
    """Has it printed anything yet, where cells print to files?"""
    return (folder / "logs" / f"{cell['hash'][:12]}.log").is_file()
