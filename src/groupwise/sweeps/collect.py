"""Collects the finished runs of a sweep as rows of `results/measured`."""

import argparse
import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from groupwise.checkout import CONF
from groupwise.config.compose import register
from groupwise.config.identity import stable_config
from groupwise.config.schema import RunConfig
from groupwise.errors import UserError, command
from groupwise.rows import FIRST, METRICS, NOT_IN_TABLES, Row, read_table, table_path, write_table
from groupwise.sweeps.cells import PAPER, Cell, read_sweep, scale_of
from groupwise.sweeps.prepare import PlannedCell, table_cells

BESIDE = {"curves": ("hash", "step", "seconds"), "texts": ("hash", "input", "source", "reference", "output")}
"""Other files of a sweep than its rows, and the columns that they begin with."""
SAMPLES = 3
"""Inputs of the test set whose texts are kept."""


def collect(name: str, scale: str, runs: Path, out: Path, conf: Path = CONF) -> list[str]:
    """Write the rows of `sweeps/<name>.yaml` at that scale, curves for cells that evaluate them, and samples of texts.

    A cell whose run is not in `runs` keeps its row.

    Returns:
        Lines for the user: how many rows, which cells are missing, which rows were dropped.

    Raises:
        UserError: no such sweep, no finished run of it, or a result that does not match its run's configuration.
    """
    register()
    cells = _by_cell(table_cells(read_sweep(conf / "sweep" / f"{name}.yaml"), scale, conf))
    paths = {kind: table_path(out, name, scale, kind) for kind in ("", *BESIDE)}
    before = {kind: _by_run(read_table(path)) for kind, path in paths.items()}
    found: dict[str, list[Mapping[str, Any]]] = {kind: [] for kind in paths}
    missing, kept = [], set()
    for cell, planned in cells:
        run = (cell.name, str(cell.seed), planned.hash)
        first = {"sweep": name, "cell": cell.name, "seed": str(cell.seed), "scale": scale, "hash": planned.hash}
        folder = runs / planned.hash[:12]
        row = result_row(folder, planned.config, planned.hash)
        if row is not None:
            found[""].append({**row, **first})
            if getattr(planned.config.eval, "curve", False):
                found["curves"] += [{**of_step, **first} for of_step in curve_rows(folder)]
            found["texts"] += [{**text, **first} for text in text_rows(folder)]
        elif run in before[""]:
            for kind, known in before.items():
                found[kind] += known.get(run, ())
        else:
            missing.append(planned.name)
        kept.add(run)
    if not found[""]:
        raise UserError(f"No finished run of +sweep={name} scale={scale} in {runs}: run the sweep first.")
    for kind, rows in found.items():
        if rows:
            write_table(paths[kind], rows, BESIDE.get(kind, FIRST))
    return [
        f"{paths['']}: {len(found[''])} of {len(cells)} cells",
        *(f"  missing: {cell}" for cell in missing),
        *(
            f"  dropped: {run[0]} seed={run[1]}, which the sweep has no longer, or not so"
            for run in before[""]
            if run not in kept
        ),
    ]


def _by_run(rows: Iterable[Row]) -> dict[tuple[str, str, str], list[Row]]:
    """Cell, seed and hash -> rows, in their order."""
    found: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        found.setdefault((row.get("cell", ""), row.get("seed", ""), row.get("hash", "")), []).append(row)
    return found


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
            f"{path} has the hash {str(row['hash'])[:12]} but is in the folder of {expected[:12]}: {again}."
        )
    for key, value in settings.items():
        if row[key] != value:
            raise UserError(f"{path} says {key}={row[key]}, but the configuration of its hash has {value}: {again}.")
    return {key: value for key, value in row.items() if not key.startswith(NOT_IN_TABLES)}


def curve_rows(folder: Path) -> list[dict[str, Any]]:
    """Step, seconds and metrics of each evaluation of a run, from `metrics.jsonl`; raises `UserError` if unreadable."""
    rows = []
    for logged in _lines(folder / "metrics.jsonl", "step"):
        found = {key: value for key, value in logged.items() if key.startswith(METRICS)}
        if found:
            rows.append({"step": logged["step"], "seconds": logged.get("seconds"), **found})
    return rows


def text_rows(folder: Path) -> list[dict[str, Any]]:
    """A run's generated texts for `SAMPLES` inputs of the test set, at equal distances so as not to be selected.

    Raises:
        UserError: the file cannot be read.
    """
    path = folder / "outputs-test.jsonl"
    lines = _lines(path, "source", "references", "output") if path.is_file() else []
    found = []
    for place in dict.fromkeys(len(lines) * i // SAMPLES for i in range(min(SAMPLES, len(lines)))):
        line = lines[place]
        reference = next(iter(line["references"]), "")
        found.append({"input": place, "source": line["source"], "reference": reference, "output": line["output"]})
    return found


def _lines(path: Path, *keys: str) -> list[dict[str, Any]]:
    """The lines of a run's file, each with these keys."""
    try:
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        if absent := [key for line in lines for key in keys if key not in line]:
            raise ValueError(f"no {absent[0]}")
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({error}): run that cell again with overwrite=true.") from error
    return lines


def _by_cell(cells: list[tuple[Cell, PlannedCell]]) -> list[tuple[Cell, PlannedCell]]:
    """In the order of the file, the seeds of a cell together."""
    places = {name: place for place, name in enumerate(dict.fromkeys(cell.name for cell, _ in cells))}
    return sorted(cells, key=lambda pair: (places[pair[0].name], pair[0].seed))


@command
def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m groupwise.sweeps.collect", description=__doc__.split("\n")[0])
    parser.add_argument("sweeps", nargs="+", metavar="SWEEP", help="names of files in sweeps/, and scale=mini")
    parser.add_argument("--runs", type=Path, default=Path("results/runs"), help="where the runs are")
    parser.add_argument("--out", type=Path, default=Path("results/measured"), help="where the tables go")
    given = parser.parse_args(arguments)
    names = [item for item in given.sweeps if "=" not in item]
    scale = [PAPER, *(scale_of(item) for item in given.sweeps if "=" in item)][-1]
    if not names:
        raise UserError("Name a sweep, such as cifar.")
    given.out.mkdir(parents=True, exist_ok=True)
    for name in names:
        for line in collect(name, scale, given.runs, given.out):
            print(line, file=sys.stderr if line.startswith(" ") else sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
