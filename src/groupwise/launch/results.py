"""What a finished run's folder says, refused where it cannot be true."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from groupwise.config import RunConfig
from groupwise.errors import UserError
from groupwise.launch.measured import METRICS
from groupwise.training.identity import stable_config


def result_row(folder: Path, config: RunConfig, expected: str) -> dict[str, Any] | None:
    """The row in `result.json`, without the machine's paths; None where the run is not done.

    Args:
        expected: the hash of `config`, which the folder is named by.

    Raises:
        UserError: the file cannot be read, lacks a key of the configuration, or holds another configuration's result.
    """
    if not (folder / "DONE").is_file():
        return None
    path = folder / "result.json"
    again = "run that cell again with overwrite=true"
    try:
        row = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({str(error).splitlines()[0]}): {again}.") from error
    settings = stable_config(config)
    if absent := [key for key in ("hash", *settings) if not isinstance(row, dict) or key not in row]:
        raise UserError(f"{path} has no {absent[0]}: {again}.")
    if row["hash"] != expected:
        raise UserError(
            f"{path} has the hash {str(row['hash'])[:12]} and lies in the folder of {expected[:12]}: {again}."
        )
    for key, value in settings.items():
        if row[key] != value:
            raise UserError(f"{path} says {key}={row[key]}, and the configuration of its hash has {value}: {again}.")
    return {key: value for key, value in row.items() if not key.startswith("paths.")}


def curve_rows(folder: Path) -> list[dict[str, Any]]:
    """Step, seconds and metrics of each evaluation of a run, from `metrics.jsonl`.

    Raises:
        UserError: a line of it cannot be read.
    """
    path = folder / "metrics.jsonl"
    rows = []
    try:
        for line in path.read_text(encoding="utf-8").splitlines():
            logged = json.loads(line)
            found = {key: value for key, value in logged.items() if key.startswith(METRICS)}
            if found:
                rows.append({"step": logged["step"], "seconds": logged.get("seconds"), **found})
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"{path} cannot be read ({error}): run that cell again with overwrite=true.") from error
    return rows
