"""Gather the rows of finished runs into one committed table:  python -m groupwise.analysis.collect --help

A run counts when its folder holds DONE. Every row keeps its provenance: hash, commit, versions, data checksums, seeds,
plan and scale. Rows of other runs already in the table stay; a run collected again replaces its row.
"""

import argparse
import json
import sys
from pathlib import Path

import pandas as pd

from groupwise.atomic import write_text
from groupwise.errors import UserError

FIRST = ("task", "scale", "model.name", "model.fresh", "clip.name", "privacy.epsilon", "seed", "optim.learning_rate")
METRICS = ("valid/", "test/", "nonprivate/train_")


def collect(runs: Path, table: Path, **chosen: str) -> pd.DataFrame:
    """Merge the result rows under `runs` that match `chosen` (column -> value) into the CSV `table`.

    Raises:
        UserError: no finished run matches.
    """
    rows = [json.loads((done.parent / "result.json").read_text()) for done in sorted(runs.glob("*/DONE"))]
    rows = [{key: value for key, value in row.items() if not key.startswith("paths.")} for row in rows]
    rows = [row for row in rows if all(str(row.get(key)) == value for key, value in chosen.items())]
    if not rows:
        wanted = " ".join(f"{key}={value}" for key, value in chosen.items())
        raise UserError(f"No finished run in {runs} matches {wanted or 'anything'}: run the sweep first.")
    frame = pd.DataFrame(rows)
    if table.exists():
        old = pd.read_csv(table)
        frame = pd.concat([old[~old["hash"].isin(frame["hash"])], frame])
    first = [name for name in FIRST if name in frame]
    metrics = metric_columns(frame)
    rest = sorted(set(frame) - {*first, *metrics})
    frame = frame[[*first, *metrics, *rest]].sort_values([*first, "hash"])
    table.parent.mkdir(parents=True, exist_ok=True)
    write_text(table, frame.to_csv(index=False))
    return frame


def metric_columns(frame: pd.DataFrame) -> list[str]:
    """What a run was evaluated by, validation set first."""
    return [name for prefix in METRICS for name in sorted(frame) if name.startswith(prefix)]


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m groupwise.analysis.collect", description=__doc__.split("\n")[0])
    parser.add_argument("table", type=Path, help="the CSV to write, such as results/measured/cifar_mini.csv")
    parser.add_argument("chosen", nargs="*", metavar="KEY=VALUE", help="only these runs, such as task=cifar scale=mini")
    parser.add_argument("--runs", type=Path, default=Path("results/runs"), help="where the runs are")
    given = parser.parse_args(arguments)
    try:
        if wrong := [item for item in given.chosen if "=" not in item]:
            raise UserError(f"{wrong[0]!r} is no KEY=VALUE.")
        frame = collect(given.runs, given.table, **dict(item.split("=", 1) for item in given.chosen))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    shown = [name for name in FIRST if name in frame] + [n for n in metric_columns(frame) if "loss" not in n]
    print(frame[shown].to_string(index=False))
    return 0


if __name__ == "__main__":
    sys.exit(main())
