"""Reproduces a committed row and compares:  python -m groupwise.sweeps.reproduce HASH [HASH ...]

A row can be reproduced if its noise key is not secret (`data.public=true`, `debug.noise_seed`) or it has no noise. On
the same kind of machine, with the same packages and code, all metrics must be bit-identical; otherwise they must agree
within a tolerance.
"""

import argparse
import math
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from groupwise.config.compose import compose_run, register
from groupwise.config.identity import config_hash
from groupwise.config.schema import RunConfig
from groupwise.errors import UserError, command
from groupwise.rows import METRICS, Row, read_table
from groupwise.sweeps.cells import read_sweep

DECIDES = ("system.device", "system.processor", "system.threads", "versions.torch", "versions.numpy", "git.sha")
"""Columns of machine, packages and code. Rows with equal values in all of these must be bit-identical. Rows of earlier
versions lack the processor."""
POINTS, LOSS = 1.0, 0.05
"""Otherwise, the tolerances of percentages and of losses."""


def find_row(digest: str, measured: Path) -> Row:
    """The committed row whose hash begins with `digest`.

    Raises:
        UserError: there is no such row, or there are several.
    """
    every = (row for path in sorted(measured.glob("*.csv")) for row in read_table(path) if "git.sha" in row)
    rows = [row for row in every if row.get("sweep") and row.get("hash", "").startswith(digest)]
    found = {row["hash"] for row in rows}
    if len(digest) < 6 or len(found) != 1:
        what = "no row" if not found else f"{len(found)} runs"
        raise UserError(
            f"{measured} has {what} whose hash begins with {digest!r}: give 6 digits or more of a row's hash."
        )
    return rows[0]


def config_of(row: Row, conf: Path, sweeps: Path) -> RunConfig:
    """The configuration of the row's run, composed from the sweep as it is today.

    Raises:
        UserError: the cell no longer exists or has changed, or the noise key was secret.
    """
    cells = read_sweep(sweeps / f"{row['sweep']}.yaml").cells(row["scale"])
    cell = next((each for each in cells if (each.name, str(each.seed)) == (row["cell"], row["seed"])), None)
    if cell is None:
        raise UserError(f"sweeps/{row['sweep']}.yaml has no cell {row['cell']} seed={row['seed']} any more.")
    config = compose_run(list(cell.overrides), conf, typed=False)
    if config_hash(config) != row["hash"]:
        raise UserError(
            f"{row['cell']} seed={row['seed']} now has another configuration than this row: check out the row's commit."
        )
    secret = not config.data.public and config.debug.noise_seed is None
    if secret and row.get("plan.noise_multiplier", "0.0") not in ("", "0.0"):
        raise UserError(
            f"Row {row['hash'][:12]} had a secret key, which was deleted: choose a row with data.public=true."
        )
    return config


def compare(row: Row, again: dict[str, object]) -> tuple[bool, list[str]]:
    """Whether the new row agrees, and a line for each metric.

    If all of `DECIDES` are equal, metrics must be bit-identical. Otherwise percentages must agree within `POINTS`, and
    losses within `LOSS`.
    """
    other = [key for key in DECIDES if str(again.get(key, "")) != row.get(key, "")]
    lines, good, equal = [], True, True
    for key in sorted(key for key in row if key.startswith(METRICS) and row[key]):
        then, now = float(row[key]), again.get(key)
        allowed = (LOSS if key.endswith(("loss", "nll")) else POINTS) if other else 0.0
        same = now == then or (math.isnan(then) and isinstance(now, float) and math.isnan(now))
        good &= same or (isinstance(now, int | float) and abs(now - then) <= allowed)
        equal &= same
        lines.append(f"{key}: {then!r} then, {now!r} now")
    how = f"within {POINTS:g} point, because of another {', '.join(other)}" if other and not equal else "bit for bit"
    if not good and "git.sha" in other:
        how += f": the row is from commit {row['git.sha'][:7]}, and this code gives other bits: run the cell again"
    return good, [*lines, f"{'reproduced' if good else 'NOT reproduced'}, {how}"]


@command
def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit code: 0, 1 if a row differs, 2 for a mistake."""
    parser = argparse.ArgumentParser(prog="python -m groupwise.sweeps.reproduce", description=__doc__.split("\n")[0])
    parser.add_argument("hashes", nargs="+", metavar="HASH", help="of a row in results/measured, 6 digits or more")
    parser.add_argument("--measured", type=Path, default=Path("results/measured"), help="folder of the rows")
    parser.add_argument("--sweeps", type=Path, default=Path("sweeps"), help="folder of the sweeps")
    parser.add_argument("--conf", type=Path, default=Path("conf"), help="folder of the configurations")
    parser.add_argument("--data", default=None, help="folder of the data (paths.data)")
    given = parser.parse_args(arguments)
    register()
    good = True
    rows = [find_row(digest, given.measured) for digest in given.hashes]
    configs = [config_of(row, given.conf, given.sweeps) for row in rows]
    from groupwise.processes.start import start

    for row, config in zip(rows, configs, strict=True):
        if microbatch := row.get("system.microbatch"):  # so that sums are in the same order
            config = replace(config, train=replace(config.train, microbatch=int(microbatch)))
        print(f"{row['sweep']}: {row['cell']} seed={row['seed']} scale={row['scale']}")
        with tempfile.TemporaryDirectory() as folder:
            paths = replace(config.paths, results=folder, data=given.data or config.paths.data)
            again = start(replace(config, paths=paths, overwrite=False))
        same, lines = compare(row, again)
        print(*lines, sep="\n")
        good = good and same
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
