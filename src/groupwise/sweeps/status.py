"""Shows how far sweeps are:  python -m groupwise.sweeps.status  (all), or  ... status FOLDER --cells"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import textwrap
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import mean

from groupwise.errors import UserError
from groupwise.sweeps.folder import CELLS, read_cells
from groupwise.sweeps.states import DONE, FAILED, INTERRUPTED, RUNNING, STATES, WAITING, State, cell_states


def status(folder: Path, each: bool = False) -> list[str]:
    """Lines on the sweep in `folder`; with `each`, one more for each cell.

    Raises:
        UserError: it is no sweep's folder.
    """
    cells = cell_states(folder, read_cells(folder))
    scale = json.loads((folder / CELLS).read_text(encoding="utf-8")).get("scale", "")
    counts = Counter(cell.kind for cell in cells)
    told = ", ".join(f"{counts[kind]} {kind}" for kind in STATES if counts[kind])
    left = seconds_left(cells)
    until = [] if left is None else [f"  {_in_words(left)} left"]
    lines = [str(folder), f"  {scale}  {len(cells)} cells: {told}", *until]
    if counts[INTERRUPTED]:
        lines.append("  interrupted cells go on with the same command, or where SLURM puts them back")
    shown = cells if each else [cell for cell in cells if cell.kind == FAILED]
    width = max(map(len, STATES))
    columns, indent = shutil.get_terminal_size().columns, " " * (width + 4)
    for cell in shown:
        head, note = f"  {cell.kind:{width}}  {cell.name}", _note(cell)
        fits = len(head) + 2 + len(note) <= columns
        for part in [f"{head}  {note}".rstrip()] if fits else [head, f"{indent}{note}"]:
            lines += textwrap.wrap(part, columns, subsequent_indent=indent, break_on_hyphens=False)
    return lines


def seconds_left(cells: Sequence[State]) -> float | None:
    """Until all that run or wait are done, from what the finished ones took and the running ones have left.

    As many are taken to run at once as run now. None: nothing runs, or nothing is known yet.
    """
    running = [cell for cell in cells if cell.kind == RUNNING]
    took = [cell.seconds for cell in cells if cell.kind == DONE and cell.seconds]
    took += [cell.elapsed / (1 - cell.left) for cell in running if cell.left is not None and cell.left < 0.95]
    if not running or not took:
        return None
    usual = mean(took)
    rest = sum(usual * (1.0 if cell.left is None else cell.left) for cell in running)
    return (rest + usual * sum(cell.kind == WAITING for cell in cells)) / len(running)


def _note(cell: State) -> str:
    return f"({cell.seconds:.0f} s)" if cell.seconds is not None else cell.note


def _in_words(seconds: float) -> str:
    if seconds < 90:
        return f"about {max(seconds, 1):.0f} s"
    return f"about {seconds / 60:.0f} min" if seconds < 5400 else f"about {seconds / 3600:.1f} h"


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m groupwise.sweeps.status", description="How far sweeps are.")
    parser.add_argument("folders", nargs="*", type=Path, help="sweeps' folders; all in results/sweeps if none is given")
    parser.add_argument("--cells", action="store_true", help="each cell on a line of its own")
    parser.add_argument("--sweeps", type=Path, default=Path("results/sweeps"), help="where all of them are")
    given = parser.parse_args(arguments)
    try:
        folders = given.folders or sorted(file.parent for file in given.sweeps.glob(f"*/{CELLS}"))
        if not folders:
            print(f"No sweep has begun in {given.sweeps}: make sweep-cifar SCALE=mini begins one.")
        for folder in folders:
            print(*status(folder, given.cells), sep="\n")
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
