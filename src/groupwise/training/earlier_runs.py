"""Says what the weights that a run starts from have cost already: earlier runs on the same data add their budgets.

The rule is in docs/privacy.md. A model of the hub, or another folder without a record of this program, counts as
public.
"""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from groupwise.errors import UserError, reason

Entry = dict[str, Any]
"""An earlier run: "run", its hash; "task"; "public", whether its data are declared public; "sha256" of the files of its
data, [] if unknown; "noiseless"; "epsilon", "inf" if it was not private; "delta"."""
EXPORT = "provenance.json"
"""The file that `export=FOLDER` writes beside a model."""


def earlier_runs(weights: str | None, source: str | None) -> list[Entry]:
    """All runs that a run starts from, those included that they started from themselves.

    Args:
        weights: `model.weights`, a run's folder or a file in it. source: the folder of `model.source`, if it is one.

    Raises:
        UserError: a record beside the weights cannot be read.
    """
    found: list[Entry] = []
    if weights is not None:
        path = Path(weights).expanduser()
        found = _entries(path if path.is_dir() else path.parent) or [_entry(path.name)]
    return found if source is None else [*found, *_entries(Path(source))]


def counted(earlier: Sequence[Entry], task: str, data: Mapping[str, Any]) -> list[Entry]:
    """Those whose budget adds to that of a run on these data, as they had the same data or may have had them.

    Args:
        earlier: `earlier_runs`. task: the run's. data: its task's description of the data.
    """
    own = {*_digests(data)}

    def counts(run: Entry) -> bool:
        unknown = not own or not run["sha256"] or run["task"] == task
        return bool(own & {*run["sha256"]}) or (unknown and not run["public"])

    return [run for run in earlier if counts(run)]


def total(runs: Sequence[Entry], epsilon: float, delta: float) -> tuple[float, float]:
    """(ε, δ) of a run and of the `counted` earlier ones together, by basic composition: each is a sum."""
    return epsilon + sum(float(run["epsilon"]) for run in runs), delta + sum(run["delta"] for run in runs)


def exported(earlier: Sequence[Entry]) -> list[Entry]:
    """The entries that stand beside an exported model: with checksums of data only where the weights show as much."""
    return [run if run["noiseless"] else {**run, "sha256": []} for run in earlier]


def _entry(
    run: str,
    plan: Mapping[str, Any] | None = None,
    private: bool = False,
    config: Mapping[str, Any] | None = None,
    data: Mapping[str, Any] | None = None,
) -> Entry:
    plan, config, data = plan or {}, config or {}, data or {}
    task = config.get("task")
    return {
        "run": run[:12],
        "task": task,
        "public": bool(config.get("data.public")) or "generated" in data or str(task).startswith("pretrain"),
        "sha256": _digests(data),
        "noiseless": plan.get("noise_multiplier") == 0.0,
        "epsilon": plan["epsilon"] if private else "inf",
        "delta": plan["delta"] if private else 0.0,
    }


def _digests(data: Mapping[str, Any]) -> list[str]:
    """Of the files that a task's description of its data names."""
    files = data.get("sha256")
    return [str(digest) for digest in files.values()] if isinstance(files, Mapping) else []


def _entries(folder: Path) -> list[Entry]:
    """Of the record in a folder: its run, and the earlier ones that it names; [] without a record."""
    try:
        if (folder / "config.yaml").is_file() and (folder / "result.json").is_file():
            row, privacy, data = (_read(folder / f"{name}.json") for name in ("result", "privacy", "data"))
            if "earlier" not in privacy and row.get("model.weights") is not None:
                return [_entry(row["hash"])]  # by a version that did not ask where its weights came from
            own = _entry(row["hash"], privacy["plan"], privacy["private"], row, data)
            return [own, *privacy.get("earlier", [])]
        provenance = _read(folder / EXPORT) if (folder / EXPORT).is_file() else {}
        if "privacy" in provenance:
            privacy, config = provenance["privacy"], provenance.get("config", {})
            entry = _entry(
                provenance.get("hash", folder.name), privacy, privacy["private"], config, provenance.get("data")
            )
            return [entry, *privacy.get("earlier", [])]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"The record beside the weights in {folder} cannot be read ({reason(error)}), so what they cost is not "
            "known: restore it, or start from other weights."
        ) from error
    return []


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def sentence(runs: Sequence[Entry]) -> str:
    """Say what weights of earlier runs, of which these are `counted`, mean for the guarantee."""
    if not runs:
        return "The runs that the weights come from had other data, or public ones, and cost nothing here."
    names = ", ".join(run["run"] for run in runs)
    epsilon, delta = total(runs, 0.0, 0.0)
    if math.isinf(epsilon):
        return f"NOT PRIVATE all the same: the weights come from {names}, which may have shown these data as they are."
    return (
        f"The weights come from {names}, which may have had the same data: its epsilon = {epsilon:.4g} and delta = "
        f"{delta:.3g} are added."
    )
