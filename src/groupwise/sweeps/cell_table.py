"""Shows in a table what came of a sweep's cells: state, headline metric and epsilon of each."""

from __future__ import annotations

import json
import shutil
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from groupwise.sweeps.best import HEADLINES
from groupwise.sweeps.folder import read_cells
from groupwise.sweeps.status import DONE, State, cell_states


def sweep_table(folder: Path) -> list[str]:
    """The table of the sweep in `folder`; nothing where no cell is done.

    Raises:
        UserError: it is no sweep's folder.
    """
    cells = read_cells(folder)
    states = cell_states(folder, cells)
    rows = [_row(Path(cell["run"])) if state.kind == DONE else {} for cell, state in zip(cells, states, strict=True)]
    return table(states, rows)


def finished_table(cells: Iterable[tuple[str, Path]]) -> list[str]:
    """The table of cells that are done, by name and folder of the run."""
    named = list(cells)
    return table([State(name, DONE) for name, _ in named], [_row(run) for _, run in named])


def table(states: Sequence[State], rows: Sequence[Mapping[str, Any]], columns: int | None = None) -> list[str]:
    """A line a cell, as wide as the terminal: what all cells share is said once, a long name goes on below itself.

    Args:
        states: of the cells.
        rows: their result rows; empty for a cell that is not done.
        columns: of the terminal; None asks it (80 where there is none).
    """
    if not any(rows):
        return []
    columns = columns or shutil.get_terminal_size().columns
    shared = _shared([state.name.split() for state in states])
    heads = ["state", *(name for name in HEADLINES if any(name in row for row in rows)), "epsilon"]
    lines = [[state.kind, *(_figure(row, head) for head in heads[1:])] for state, row in zip(states, rows, strict=True)]
    widths = [max(len(cell) for cell in column) for column in zip(heads, *lines, strict=True)]
    found = textwrap.wrap(" ".join(["Cells of", *shared]), columns, subsequent_indent="  ") if shared else []
    for cells, name in zip([heads, *lines], ["cell", *(state.name for state in states)], strict=True):
        first = "  ".join(
            [cells[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(cells[1:], widths[1:], strict=True))]
        )
        own = " ".join(word for word in name.split() if word not in shared)
        indent = " " * (len(first) + 2)
        found += textwrap.wrap(own, columns, initial_indent=f"{first}  ", subsequent_indent=indent) or [first.rstrip()]
    if any(_claimed_only(row) for row in rows):
        found.append("* not a guarantee")
    return found


def _shared(names: Sequence[list[str]]) -> list[str]:
    """Words that all of several names have, in the order of the first."""
    return [word for word in names[0] if all(word in name for name in names)] if len(names) > 1 else []


def _row(run: Path) -> dict[str, Any]:
    try:
        return json.loads((run / "result.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


def _figure(row: Mapping[str, Any], head: str) -> str:
    if head == "epsilon":
        spent = row.get("plan.spent_epsilon", "")
        return f"{spent:.3f}{'*' if _claimed_only(row) else ''}" if isinstance(spent, int | float) else str(spent)
    return f"{row[head]:.2f}" if head in row else ""


def _claimed_only(row: Mapping[str, Any]) -> bool:
    return isinstance(row.get("plan.spent_epsilon"), int | float) and not row.get("plan.private")
