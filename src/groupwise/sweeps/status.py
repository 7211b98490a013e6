"""Shows the progress of sweeps:  python -m groupwise.sweeps.status  (all), or  ... status FOLDER --cells"""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from groupwise.errors import command
from groupwise.sweeps.best import HEADLINES
from groupwise.sweeps.folder import CELLS, is_done, read_cells

DONE, BEGUN, FAILED, WAITING = STATES = ("done", "begun", "failed", "waiting")


@dataclass(frozen=True)
class State:
    """The state of a cell."""

    name: str
    kind: str
    """One of `STATES`; "begun" means running or interrupted."""
    note: str = ""
    """For "done" the metric, ε and time; for "failed" the error; for "begun" the step."""


def state_of(folder: Path, cell: dict[str, Any]) -> State:
    """The state of a cell of the sweep in `folder`."""
    name, run = cell["name"], Path(cell["run"])
    if is_done(folder, cell):
        return finished(name, run)
    failure = folder / "failed" / f"{cell['hash'][:12]}.txt"
    if failure.is_file():
        return State(name, FAILED, note=failure.read_text(encoding="utf-8").split("\n")[0])
    return _begun(name, run) if (run / "config.hash").is_file() else State(name, WAITING)


def _begun(name: str, run: Path) -> State:
    try:
        step = int(json.loads((run / "metrics.jsonl").read_bytes().split(b"\n")[-2])["step"])  # the last whole line
        steps = int(json.loads((run / "privacy.json").read_text(encoding="utf-8"))["plan"]["steps"])
    except (OSError, ValueError, KeyError, IndexError):
        return State(name, BEGUN)
    return State(name, BEGUN, note=f"step {step} of {steps}")


def finished(name: str, run: Path) -> State:
    """The state of a cell whose run is done."""
    try:
        row = json.loads((run / "result.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return State(name, DONE)
    said = [f"{metric} {row[metric]:.2f}" for metric in HEADLINES if metric in row]
    spent, seconds = row.get("plan.spent_epsilon"), row.get("system.wall_seconds")
    if isinstance(spent, int | float):
        said.append(f"epsilon {spent:.3f}{'' if row.get('plan.private') else ' (not a guarantee)'}")
    said += [] if seconds is None else [f"{seconds:.0f} s"]
    return State(name, DONE, ", ".join(said))


def lines_of(cells: Sequence[State]) -> list[str]:
    """A line for each cell."""
    width = max(map(len, STATES))
    return [f"  {cell.kind:{width}}  {cell.name}  {cell.note}".rstrip() for cell in cells]


def status(folder: Path, each: bool = False) -> list[str]:
    """The lines to print on the sweep in `folder`, with `each` one more per cell; raises as `read_cells` does."""
    cells = [state_of(folder, cell) for cell in read_cells(folder)]
    scale = json.loads((folder / CELLS).read_text(encoding="utf-8")).get("scale", "")
    counts = Counter(cell.kind for cell in cells)
    summary = ", ".join(f"{counts[kind]} {kind}" for kind in STATES if counts[kind])
    lines = [str(folder), f"  {scale}  {len(cells)} cells: {summary}"]
    return lines + lines_of(cells if each else [cell for cell in cells if cell.kind == FAILED])


@command
def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m groupwise.sweeps.status", description="The progress of sweeps.")
    parser.add_argument("folders", nargs="*", type=Path, help="folders of sweeps; by default all in results/sweeps")
    parser.add_argument("--cells", action="store_true", help="print a line for each cell")
    parser.add_argument("--sweeps", type=Path, default=Path("results/sweeps"), help="the folder of all sweeps")
    given = parser.parse_args(arguments)
    folders = given.folders or sorted(file.parent for file in given.sweeps.glob(f"*/{CELLS}"))
    if not folders:
        print(f"No sweep has begun in {given.sweeps}: start one, for instance by make sweep-cifar SCALE=mini.")
    for folder in folders:
        print(*status(folder, given.cells), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
