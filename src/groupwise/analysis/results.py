"""Reads and checks the numbers of tables and figures: the paper's, and the measured rows.

`results/measured/<sweep>_<scale>.csv` has one row per run, `results/paper/<table>.csv` one per number of a table:

table, row, column
    Where the paper prints it; headings of several levels are joined by " / ".
metric
    The column of the measured rows to compare with; for a hyperparameter, the key of the configuration.
cell
    Settings that select one cell of the sweep of that name, or "A minus B" for a difference of two; empty if none of
    our cells is comparable. For a hyperparameter, the overrides that compose the configuration with this value.
value, std
    As printed; `value` is empty if the paper has a dash and we have a cell.
note
    Why we do not reproduce a number, or how it differs; for a hyperparameter: fixed, grid or selected.
"""

import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from groupwise.checkout import CHECKOUT
from groupwise.errors import UserError, unknown
from groupwise.rows import KEYS, ORIGIN, read_table, table_path
from groupwise.sweeps.cells import Sweep

TABLES = ("fixed_per_layer", "cifar", "glue", "sst2_epochs", "table2text", "samsum", "noise_allocation", "adaptivity")
"""The paper's tables of results, in its order; each has a sweep of its name."""
HYPERPARAMETERS = {
    "hyperparameters_cifar": "Settings for WRN16-4 on CIFAR-10",
    "hyperparameters_glue": "Settings for RoBERTa on SST-2",
    "hyperparameters_gpt2": "Settings for GPT-2 on E2E and DART",
}
"""The paper's tables of settings, and their titles."""
MINUS = " minus "


@dataclass(frozen=True)
class Folders:
    """The folders that the analysis reads."""

    paper: Path = Path("results/paper")
    measured: Path = Path("results/measured")
    sweeps: Path = Path("sweeps")

    @classmethod
    def of_checkout(cls) -> "Folders":
        """The folders of the checkout that this package is installed from, for programs that run in another folder."""
        return cls(*(CHECKOUT / own.default for own in fields(cls)))  # type: ignore[operator]


def make_each(names: Iterable[str], make: Callable[[str], str]) -> int:
    """Print what `make` returns for each name, or its `UserError`; returns the exit code, 2 if there was one."""
    code = 0
    for name in names:
        try:
            print(make(name))
        except UserError as error:
            print(f"error: {error}", file=sys.stderr)
            code = 2
    return code


def read_paper(name: str, folder: Path = Folders.paper) -> pd.DataFrame:
    """The paper's table `name`, with numbers `value` and `std`; `printed` is the paper's text of both.

    Raises `UserError` if there is no such table.
    """
    path = folder / f"{name}.csv"
    if name not in (*TABLES, *HYPERPARAMETERS):
        raise unknown("table", name, (*TABLES, *HYPERPARAMETERS))
    try:
        frame = pd.read_csv(path, dtype=str, keep_default_na=False)
    except (OSError, ValueError) as error:
        raise UserError(f"The paper's numbers are not in {path} ({str(error).splitlines()[0]}).") from error
    frame["printed"] = frame["value"] + (" (" + frame["std"] + ")").where(frame["std"] != "", "")
    return frame.assign(**{name: pd.to_numeric(frame[name], errors="coerce") for name in ("value", "std")})


def settings_of(cell: str) -> dict[str, str]:
    """The settings in a cell's name, such as ``clip=flat privacy.epsilon=3``, as a dictionary."""
    return dict(word.split("=", 1) for word in cell.split())


SCALES = {
    "paper": "the paper's cell",
    "lite": "real data, published weights that are not the paper's (MiniLM-L3, EfficientNet-Lite0)",
    "midi": "real data, 16 × 16 images on WRN16-1, texts on a GPT-2 of a million parameters",
    "mini": "real data, 8 × 8 images on WRN10-1, a RoBERTa of 68,000 or a GPT-2 of 2.6 million parameters",
    "demo": "bundled or synthetic data, a small network",
}
SHOWN = tuple(SCALES)
"""The scales in tables and figures, in order of preference; smoke is for tests."""
CONSTANT = "constant_answers.csv"
"""The file of constant-prediction baselines among the measured rows; scripts/constant_answers.py makes it."""
LEARNT = 5.0
"""Points by which a run must beat the constant-prediction baseline to be evidence for a claim."""


@dataclass(frozen=True)
class Page:
    """A page of results/tables that is not a table of the paper.

    Attributes:
        text: in Markdown.
        line: what the command prints.
        parts: the parts that docs/<name>.md also shows, by the name of the markers around them.
    """

    text: str
    line: str
    parts: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Measured:
    """Valid rows of a sweep at one scale.

    Attributes:
        rows: one per run, with the columns of the file, sorted by cell and seed.
        expected: cell -> the seeds that the sweep has for it at this scale.
        scale: one of `SHOWN`.
    """

    rows: pd.DataFrame
    expected: Mapping[str, tuple[int, ...]]
    scale: str

    def of(self, cell: str) -> pd.DataFrame:
        """The rows of one cell."""
        return self.rows[self.rows["cell"] == cell]

    def has(self, cells: Sequence[str]) -> bool:
        """Whether there are cells, and rows of each."""
        return bool(cells) and all(len(self.of(cell)) for cell in cells)

    def flags_of(self, cell: str) -> list[str]:
        """Caveats about the rows of one cell, a sentence each: missing seeds, uncommitted changes."""
        rows, expected = self.of(cell), self.expected[cell]
        if rows.empty:
            return []
        found = []
        if missing := sorted(set(expected) - set(rows["seed"])):
            words = ", ".join(str(seed) for seed in missing)
            found.append(f"{len(rows)} of {len(expected)} seeds, without {words}")
        if dirty := int(rows["git.dirty"].sum()):
            found.append(f"{dirty} of {len(rows)} runs with uncommitted changes")
        if nowhere := int((rows["git.sha"] == "").sum()):
            found.append(f"{nowhere} of {len(rows)} runs without a known commit")
        return found


Floors = Mapping[tuple[str, str], float]
"""The constant-prediction baselines, in percent, by task and metric."""


def read_floors(folder: Path) -> Floors:
    """The scores of `CONSTANT`; none if there is no file."""
    rows = read_table(folder / CONSTANT)
    return {(row["task"], row["metric"]): float(row["value"]) for row in rows}


def floor_of(task: str, metric: str, floors: Floors) -> float | None:
    """The constant-prediction baseline of the task; a pipeline's task is that of its data."""
    return floors.get((task.removesuffix("_pipeline"), metric))


def why_uninformative(task: str, metric: str, best: float, floors: Floors) -> str:
    """Why cells are inconclusive: the best is hardly above the constant-prediction baseline. Otherwise empty."""
    floor = floor_of(task, metric, floors)
    if floor is None or best >= floor + LEARNT:
        return ""
    return f"hardly learned: a constant prediction has {floor:.1f}"


def read_all(sweep: Sweep, folder: Path, wanted: Mapping[str, Sequence[str]] | None = None) -> list[Measured]:
    """The rows of every scale that has a file, in the order of `SHOWN`; raises as `read_measured` does."""
    there = [scale for scale in SHOWN if table_path(folder, sweep.name, scale).is_file()]
    return [read_measured(sweep, scale, folder, wanted) for scale in there]


def read_measured(
    sweep: Sweep, scale: str, folder: Path, wanted: Mapping[str, Sequence[str]] | None = None
) -> Measured:
    """The rows of a sweep at one scale.

    `wanted` lists the metrics that the runs of a cell must have as finite numbers; it has no effect on other cells.

    Raises:
        UserError: the file is missing, does not parse or has no rows; a column is missing; a row has a cell or seed
            that is not in the sweep; two rows have the same cell and seed, or the same run; a metric is missing or not
            finite.
    """
    path, expected = table_path(folder, sweep.name, scale), seeds_of(sweep, scale)
    frame = _read(path, f"python -m groupwise.sweeps.collect {sweep.name} scale={scale}")
    planned = {(sweep.name, cell, str(seed), scale) for cell, seeds in expected.items() for seed in seeds}
    known = [place in planned for place in frame[list(KEYS)].itertuples(index=False, name=None)]
    refuse(path, frame, ~np.array(known), f"is not a cell and seed of the sweep {sweep.name} at scale={scale}")
    refuse(path, frame, frame.duplicated(["cell", "seed"]), "is there twice")
    refuse(path, frame, frame.duplicated("hash"), "has the hash of another row, so the two are one run")
    for metric in {metric for metrics in (wanted or {}).values() for metric in metrics} & set(frame):
        frame[metric] = pd.to_numeric(frame[metric], errors="coerce")
    for cell, metrics in (wanted or {}).items():
        for metric in metrics if (own := frame["cell"] == cell).any() else ():
            if metric not in frame:
                refuse(path, frame, own, f"has no {metric}, which its table shows")
            refuse(path, frame, own & ~np.isfinite(frame[metric]), f"has a {metric} that is not a finite number")
    frame = frame.assign(seed=frame["seed"].astype(int), **{"git.dirty": frame["git.dirty"] == "True"})
    return Measured(frame.sort_values(["cell", "seed"]).reset_index(drop=True), expected, scale)


def refuse(path: Path, frame: pd.DataFrame, wrong: Any, words: str) -> None:
    """Raise a `UserError` that names the first row that is wrong, if there is one."""
    if len(odd := frame[wrong]):
        first = odd.iloc[0]
        place = f"the row of {first['cell']} seed={first['seed']}"
        raise UserError(f"{path}: {place} {words}; nothing of the file is used.")


def seeds_of(sweep: Sweep, scale: str) -> dict[str, tuple[int, ...]]:
    """The seeds of each cell that the sweep has at that scale."""
    expected: dict[str, list[int]] = {}
    for cell in sweep.cells(scale):
        expected.setdefault(cell.name, []).append(cell.seed)
    return {name: tuple(sorted(seeds)) for name, seeds in expected.items()}


def _read(path: Path, command: str) -> pd.DataFrame:
    rows = read_table(path)
    if not rows:
        raise UserError(f"{path} has no rows: collect the sweep again ({command}).")
    values = [list(row.values()) for row in rows]
    # One block of objects, because selecting rows from many columns is slow.
    frame = pd.DataFrame(values, columns=list(rows[0]), dtype=object)
    if missing := [column for column in (*KEYS, *ORIGIN) if column not in frame]:
        raise UserError(f"{path} has no column {missing[0]!r}: collect the sweep again ({command}).")
    return frame


def number(value: float, how: str = ".2f") -> str:
    """A number for a table, or a dash for NaN."""
    return "–" if math.isnan(value) else format(value, how).replace("-", "−")


def cost_of(rows: Iterable[Mapping[Any, Any]]) -> str:
    """The cost of distinct runs, ", 5.6 core-hours" or ", 2.0 hours of GPUs"; empty if a row lacks it.

    Runs that share cores are slower than single runs, so this is an upper bound.
    """
    hours = {"core-hours": 0.0, "hours of GPUs": 0.0}
    for row in {row.get("hash") or place: row for place, row in enumerate(rows)}.values():
        seconds, threads = row.get("system.wall_seconds"), row.get("system.threads")
        if not seconds or not threads:
            return ""
        on_cpu = row.get("system.device_type") == "cpu"
        hours["core-hours" if on_cpu else "hours of GPUs"] += float(seconds) * (float(threads) if on_cpu else 1) / 3600
    return "".join(f", {spent:.1f} {unit}" for unit, spent in hours.items() if spent)


def run_in_words(row: Mapping[Any, Any]) -> str:
    """``WRN10-1, epochs 2, steps 195, on cpu``, and what trains if the cell names another part; empty if unknown."""
    if not row.get("plan.steps"):
        return ""
    wide = row["model.name"] == "wide_resnet"
    model = f"WRN{row['model.depth']}-{row['model.width']}" if wide else row["model.name"]
    if (trains := row.get("model.trains")) != settings_of(row["cell"]).get("model.trains", trains):
        model += f", model.trains={trains}"
    training = f"epochs {float(row['train.epochs']):g}, steps {int(row['plan.steps']):,}"
    return f"{model}, {training}, on {row['system.device']}"


def matching(selector: str, cells: Sequence[str]) -> list[str]:
    """The cells that have all the settings of `selector`."""
    wanted = settings_of(selector).items()
    return [cell for cell in cells if wanted <= settings_of(cell).items()]
