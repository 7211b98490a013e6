"""Collects the finished runs of a sweep as rows of `results/measured`."""

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from groupwise.checkout import CONF
from groupwise.config.identity import stable_config
from groupwise.config.schema import RunConfig
from groupwise.errors import UserError, command
from groupwise.rows import FIRST, KEYS, METRICS, NOT_IN_TABLES, Row, read_table, table_path, write_table
from groupwise.sweeps.cells import PAPER, scale_of
from groupwise.sweeps.prepare import table_cells

OTHER_FILES = {"curves": ("hash", "step", "seconds"), "texts": ("hash", "input", "source", "reference", "output")}
"""The other files of a sweep, and their first columns."""
SAMPLES = 3
"""The number of test inputs whose generated texts are kept, evenly spaced, so that none is picked by hand."""


def collect(what: str, scale: str, runs: Path, out: Path, conf: Path = CONF) -> list[str]:
    """Write the rows of a sweep, the curves of cells with `eval.curve`, and samples of generated texts.

    A cell whose run is not in `runs` keeps its row, or gets the row of the same run in another sweep's table.

    Args:
        what: a file of `sweeps/`, or the path of another file, as for `table_cells`.
        out: the folder of the tables.

    Returns:
        Lines to print: the number of rows, missing cells, dropped rows.

    Raises:
        UserError: no such sweep, no finished run of it, or a result that does not match its run's configuration.
    """
    name = Path(what).name.removesuffix(".yaml")
    cells = table_cells(what, scale, conf)
    order = list(dict.fromkeys(cell.cell for cell in cells))
    paths = {kind: table_path(out, name, scale, kind) for kind in ("", *OTHER_FILES)}
    before: dict[str, dict[tuple[str, ...], list[Row]]] = {kind: defaultdict(list) for kind in paths}
    for kind, path in paths.items():
        for row in read_table(path):
            before[kind][row.get("cell", ""), row.get("seed", ""), row.get("hash", "")].append(row)
    elsewhere = {row["hash"]: row for path in sorted(out.glob(f"*_{scale}.csv")) for row in read_table(path)}
    found: dict[str, list[Mapping[str, Any]]] = {kind: [] for kind in paths}
    missing: list[str] = []
    known = set()
    for cell in sorted(cells, key=lambda cell: (order.index(cell.cell), cell.seed)):
        run, folder = (cell.cell, str(cell.seed), cell.hash), runs / cell.hash[:12]
        known.add(run)
        first = dict(zip((*KEYS, "hash"), (name, cell.cell, cell.seed, scale, cell.hash), strict=True))
        result = result_row(folder, cell.config, cell.hash)
        if result is not None:
            curve = curve_rows(folder) if cell.config.eval.curve else []
            for kind, made in (("", [result]), ("curves", curve), ("texts", text_rows(folder))):
                found[kind] += [{**each, **first} for each in made]
        elif run in before[""]:
            for kind, earlier in before.items():
                found[kind] += earlier.get(run, ())
        elif cell.hash in elsewhere and not cell.config.eval.curve:
            found[""].append({**elsewhere[cell.hash], **first})
        else:
            missing.append(cell.name)
    if not found[""]:
        raise UserError(f"No finished run of {what} at scale={scale} in {runs}: run the sweep first.")
    out.mkdir(parents=True, exist_ok=True)
    for kind, rows in found.items():
        if rows:
            write_table(paths[kind], rows, OTHER_FILES.get(kind, FIRST))
    dropped = [f"{cell} seed={seed}" for cell, seed, digest in before[""] if (cell, seed, digest) not in known]
    return [
        f"{paths['']}: {len(found[''])} of {len(cells)} cells",
        *(f"  missing: {cell}" for cell in missing),
        *(f"  dropped: {cell}, which is no longer a cell of the sweep" for cell in dropped),
    ]


def result_row(folder: Path, config: RunConfig, expected: str) -> dict[str, Any] | None:
    """The row in `result.json`, without paths; None if the run is not done. `expected` is the hash of `config`.

    Raises:
        UserError: the file cannot be read, lacks a key of the configuration, or holds another configuration's result.
    """
    if not (folder / "DONE").is_file():
        return None
    path = folder / "result.json"
    again = "run that cell again with overwrite=true"
    try:
        row = dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"{path} cannot be read ({str(error).splitlines()[0]}): {again}.") from error
    for key, value in {"hash": expected, **stable_config(config)}.items():
        if key not in row or row[key] != value:
            said = f"says {key}={row[key]}" if key in row else f"has no {key}"
            raise UserError(f"{path} {said}, but the configuration of its hash has {value}: {again}.")
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
    """A run's generated texts for `SAMPLES` evenly spaced inputs of the test set; raises `UserError` if unreadable."""
    path = folder / "outputs-test.jsonl"
    lines = _lines(path, "source", "references", "output") if path.is_file() else []
    found = []
    for place in dict.fromkeys(len(lines) * i // SAMPLES for i in range(min(SAMPLES, len(lines)))):
        line = lines[place]
        reference = next(iter(line["references"]), "")
        found.append({"input": place, "source": line["source"], "reference": reference, "output": line["output"]})
    return found


def _lines(path: Path, *keys: str) -> list[dict[str, Any]]:
    """The rows of a file of a run, which must have these keys."""
    try:
        with open(path, encoding="utf-8") as file:  # not splitlines, which also splits at U+2028
            lines = [json.loads(line) for line in file]
        if absent := [key for line in lines for key in keys if key not in line]:
            raise ValueError(f"no {absent[0]}")
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({error}): run that cell again with overwrite=true.") from error
    return lines


@command
def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m groupwise.sweeps.collect", description=__doc__.split("\n")[0])
    parser.add_argument(
        "sweeps", nargs="+", metavar="SWEEP", help="cifar or path/NAME.yaml; scale=paper unless scale=mini"
    )
    parser.add_argument("--runs", type=Path, default=Path("results/runs"), help="folder of the runs")
    parser.add_argument("--out", type=Path, default=Path("results/measured"), help="folder of the tables")
    given = parser.parse_args(arguments)
    names = [item for item in given.sweeps if "=" not in item]
    scale = [PAPER, *(scale_of(item) for item in given.sweeps if "=" in item)][-1]
    if not names:
        raise UserError("Give the name of a sweep, such as cifar.")
    for name in names:
        for line in collect(name, scale, given.runs, given.out):
            print(line, file=sys.stderr if line.startswith(" ") else sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
