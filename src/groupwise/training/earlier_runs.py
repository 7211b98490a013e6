"""Adds up the privacy budgets of the earlier runs that a run's starting weights come from.

The rule is in docs/privacy.md. A model from the Hugging Face Hub, or from any folder without a record of this program,
counts as public.
"""

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from groupwise.errors import UserError, reason

Entry = dict[str, Any]
"""An earlier run: "run" (its hash), "public" (whether its data are public or synthetic), "files" (SHA-256 of its public
files), "epsilon" ("inf" if it was not private) and "delta"."""
EXPORT = "provenance.json"
"""The name of the file that `export=FOLDER` writes beside a model."""


def earlier_runs(weights: str | None, source: str | None, files: Iterable[str] = ()) -> list[Entry]:
    """List all runs that the starting weights come from, directly or through other runs.

    A run on public files does not count as public if this run protects one of these files. Raises `UserError` if a
    record beside the weights cannot be read.

    Args:
        weights: `model.weights`: the folder of a run, or a file in it.
        source: the folder of `model.source`.
        files: SHA-256 of the files that this run protects.
    """
    if weights is None:
        found = [] if source is None else _entries(Path(source))
    else:
        path = Path(weights).expanduser()  # they replace all weights of `source`
        unknown = {"run": path.name, "public": False, "files": [], "epsilon": "inf", "delta": 0.0}
        found = _entries(path if path.is_dir() else path.parent) or [unknown]
    return [run | {"public": run["public"] and not set(files) & set(run["files"])} for run in found]


def counted(earlier: Sequence[Entry]) -> list[Entry]:
    """The earlier runs whose budgets are added: those whose data are not public."""
    return [run for run in earlier if not run["public"]]


def total(runs: Sequence[Entry], epsilon: float, delta: float) -> tuple[float, float]:
    """(ε, δ) of a run together with the `counted` earlier runs, by basic composition: the sums of all ε and all δ."""
    return epsilon + sum(float(run["epsilon"]) for run in runs), delta + sum(run["delta"] for run in runs)


def _entries(folder: Path) -> list[Entry]:
    """The run that is recorded in a folder, followed by its own earlier runs; [] if there is no record."""
    try:
        if (folder / "config.yaml").is_file() and (folder / "result.json").is_file():
            config, privacy, data = (_read(folder / f"{name}.json") for name in ("result", "privacy", "data"))
            run, plan = config["hash"], privacy["plan"]
        else:
            provenance = _read(folder / EXPORT)
            if "privacy" not in provenance:
                return []
            run, config, data = (provenance.get(name, {}) for name in ("hash", "config", "data"))
            privacy = plan = provenance["privacy"]
        entry = {
            "run": str(run or folder.name)[:12],
            "public": bool(config.get("data.public")) or config.get("data.name") == "synthetic",
            "files": sorted(data.get("sha256", {}).values()) if config.get("data.public") else [],
            "epsilon": "inf",
            "delta": 0.0,
        }
        if privacy["private"]:
            entry |= {"epsilon": plan["epsilon"], "delta": plan["delta"]}
        return [entry, *({"files": [], **run} for run in privacy.get("earlier", []))]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"The record beside the weights in {folder} cannot be read ({reason(error)}), so their privacy budget is "
            "unknown: restore it, or start from other weights."
        ) from error


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def sentence(runs: Sequence[Entry]) -> str:
    """A sentence that says what the `counted` earlier runs mean for the guarantee."""
    if not runs:
        return "The runs that the weights come from used public data, so they add nothing to the budget."
    names = ", ".join(run["run"] for run in runs)
    epsilon, delta = total(runs, 0.0, 0.0)
    if math.isinf(epsilon):
        return f"NOT PRIVATE: the weights come from {names}, which had no privacy guarantee and may reveal its data."
    return f"The weights come from {names}; their epsilon = {epsilon:.4g} and delta = {delta:.3g} are added."
