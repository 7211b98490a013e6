"""Gathers the rows of finished runs into the committed tables:  python -m groupwise.sweeps.collect cifar scale=mini

For each sweep, `results/measured/<sweep>_<scale>.csv`: one row for each cell and seed whose run has `DONE`, with the
whole configuration and where it came from. Rows of cells that are not on this machine stay as they are.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import groupwise
from groupwise.config.compose import register
from groupwise.config.identity import stable_config
from groupwise.config.schema import RunConfig
from groupwise.errors import UserError
from groupwise.rows import METRICS, NOT_IN_TABLES, Table, read_table, table_path, write_table
from groupwise.sweeps.cells import PAPER, Cell, read_sweep
from groupwise.sweeps.prepare import PlannedCell, table_cells

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
    path, curves_path = table_path(out, name, scale), table_path(out, name, scale, curves=True)
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
    return {key: value for key, value in row.items() if not key.startswith(NOT_IN_TABLES)}


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
