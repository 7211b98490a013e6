"""Gather the rows of finished runs into the committed tables:  python -m groupwise.sweeps.collect cifar scale=mini

For each sweep, `results/measured/<sweep>_<scale>.csv`: one row for each cell and seed whose run has `DONE`, with the
whole configuration and where it came from. Rows of cells that are not on this machine stay as they are.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import groupwise
from groupwise.config.compose import register
from groupwise.errors import UserError
from groupwise.sweeps.cells import PAPER, Cell, read_sweep
from groupwise.sweeps.prepare import PlannedCell, table_cells
from groupwise.sweeps.rows import Table, curve_rows, read_table, result_row, write_table

CONF = Path(groupwise.__file__).resolve().parents[2] / "conf"


def collect(name: str, scale: str, runs: Path, out: Path, conf: Path = CONF) -> list[str]:
    """Write the rows of `sweeps/<name>.yaml` at that scale, and its curves where cells ask for them.

    Returns:
        What there is to say: how many rows, which cells are missing, which rows were dropped.

    Raises:
        UserError: no such sweep, no finished run of it, or a run's result is not what its configuration makes.
    """
    register()
    cells = _by_cell(table_cells(read_sweep(conf / "sweep" / f"{name}.yaml"), scale, conf))
    path, curves_path = out / f"{name}_{scale}.csv", out / f"{name}_{scale}_curves.csv"
    before, curves_before = read_table(path), read_table(curves_path)
    said, table, curves = [], Table(), Table()
    missing = []
    for cell, planned in cells:
        first = {"sweep": name, "cell": cell.name, "seed": str(cell.seed), "scale": scale}
        folder = runs / planned.hash[:12]
        row = result_row(folder, planned.config, planned.hash)
        if row is not None:
            table.add(first, [row])
            if getattr(planned.config.eval, "curve", False):
                curves.add({**first, "hash": planned.hash}, curve_rows(folder))
        elif kept := before.of(cell.name, cell.seed, planned.hash):
            table.keep(kept)
            curves.keep(curves_before.of(cell.name, cell.seed, planned.hash))
        else:
            missing.append(planned.name)
    if not table.rows:
        raise UserError(f"No finished run of +sweep={name} scale={scale} in {runs}: run the sweep first.")
    write_table(path, table)
    if curves.rows:
        write_table(curves_path, curves, by_step=True)
    said.append(f"{path}: {len(table.rows)} of {len(cells)} cells")
    said += [f"  missing: {cell}" for cell in missing]
    said += [f"  dropped: {cell}, which the sweep has no longer, or not so" for cell in before.lost(table)]
    return said


def _by_cell(cells: list[tuple[Cell, PlannedCell]]) -> list[tuple[Cell, PlannedCell]]:
    """In the order of the file, the seeds of a cell together."""
    places = {name: place for place, name in enumerate(dict.fromkeys(cell.name for cell, _ in cells))}
    return sorted(cells, key=lambda pair: (places[pair[0].name], pair[0].seed))


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m groupwise.sweeps.collect", description=__doc__.split("\n")[0])
    parser.add_argument("sweeps", nargs="+", metavar="SWEEP", help="names of files in sweeps/, and scale=mini")
    parser.add_argument("--runs", type=Path, default=Path("results/runs"), help="where the runs are")
    parser.add_argument("--out", type=Path, default=Path("results/measured"), help="where the tables go")
    given = parser.parse_args(arguments)
    names = [item for item in given.sweeps if "=" not in item]
    settings = dict(item.split("=", 1) for item in given.sweeps if "=" in item)
    try:
        scale = settings.pop("scale", PAPER)
        if settings:
            raise UserError(f"{next(iter(settings))}=… cannot be given here: only scale=….")
        if not names:
            raise UserError("Name a sweep, such as cifar.")
        given.out.mkdir(parents=True, exist_ok=True)
        for name in names:
            for line in collect(name, scale, given.runs, given.out):
                print(line, file=sys.stderr if line.startswith(" ") else sys.stdout)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
