"""Measures gradient norms at kept weights:  python -m groupwise.sweeps.gradient_norms gradnorm_cifar scale=mini

For each finished run of the sweep and each of its weights-<step>.pt (`train.keep`), the clipping engine computes the
gradient norms of some training examples in each layer, and writes `results/measured/<sweep>_<scale>_norms.csv`.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from groupwise.atomic import write_text
from groupwise.errors import UserError, command
from groupwise.rows import csv_text
from groupwise.sweeps.cells import PAPER, scale_of
from groupwise.sweeps.prepare import PlannedCell, table_cells

COLUMNS = ("sweep", "cell", "seed", "scale", "hash", "epoch", "step", "layer", "name", "example", "norm")


def rows_of(cell: PlannedCell, folder: Path, examples: int, layers: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Rows of epoch, step, layer, name, example and norm, for the weights that the run in `folder` kept.

    Args:
        examples: how many to draw from the training set, with a fixed seed.
        layers: glob patterns of layer names; empty means all layers.

    Raises:
        UserError: the run kept no weights, or no layer has such a name.
    """
    import numpy as np
    import torch

    from groupwise.clipping import gradient_norms
    from groupwise.run import plan_run
    from groupwise.tasks import make_task
    from groupwise.training.checkpoint import load_checkpoint

    kept = sorted(folder.glob("weights-*.pt"), key=_step)
    if not kept:
        raise UserError(f"{folder} has no weights-<step>.pt: run its cell with train.keep=[0,1,2], the list of epochs.")
    config = cell.config
    task = make_task(config, torch.device("cpu"))
    plan = plan_run(config, task.train_size, 1)
    chosen = np.sort(np.random.default_rng(0).permutation(task.train_size)[:examples])
    size = min(config.train.microbatch or 64, 64)
    for path in kept:
        task.model.load_state_dict(load_checkpoint(path))
        norms = gradient_norms(task.model.eval(), task.losses_of, chosen, microbatch=size)  # type: ignore[arg-type]
        wanted = [name for name in norms if not layers or any(fnmatchcase(name, glob) for glob in layers)]
        if not wanted:
            raise UserError(f"no layer is named {', '.join(layers)}: choose from {', '.join(norms)}.")
        step = _step(path)
        epoch = round(step * plan.expected_batch_size / plan.dataset_size, 2)
        for place, name in enumerate(norms):
            if name in wanted:
                for example, norm in zip(chosen, norms[name].tolist(), strict=True):
                    found = {"epoch": epoch, "step": step, "layer": place, "name": name}
                    yield {**found, "example": int(example), "norm": float(f"{norm:.5g}")}


def _step(path: Path) -> int:
    return int(path.stem.rpartition("-")[2])


def measure(name: str, scale: str, examples: int, layers: Sequence[str], runs: Path, out: Path) -> Path:
    """Write the norms of all runs of `sweeps/<name>.yaml`; returns the file.

    Raises:
        UserError: no such sweep, a run that is not done, or as for `rows_of`.
    """
    rows: list[dict[str, Any]] = []
    for cell in table_cells(name, scale):
        folder = runs / cell.hash[:12]
        if not (folder / "DONE").is_file():
            raise UserError(f"{cell.name} is not done in {runs}: run python run.py -m +sweep={name} scale={scale}")
        first = {"sweep": name, "cell": cell.cell, "seed": cell.seed, "scale": scale, "hash": cell.hash}
        rows += [first | row for row in rows_of(cell, folder, examples, layers)]
    path = out / f"{name}_{scale}_norms.csv"
    out.mkdir(parents=True, exist_ok=True)
    write_text(path, csv_text(COLUMNS, ([row[name] for name in COLUMNS] for row in rows)))
    return path


@command
def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m groupwise.sweeps.gradient_norms", description=__doc__.split("\n")[0]
    )
    parser.add_argument("sweep", help="a file of sweeps/ whose cells set train.keep")
    parser.add_argument("scale", nargs="?", default=f"scale={PAPER}", help="such as scale=mini")
    parser.add_argument("--examples", type=int, default=32, help="how many training examples, drawn at random")
    parser.add_argument("--layers", nargs="*", default=[], metavar="GLOB", help="names of layers, such as '*out_proj'")
    parser.add_argument("--runs", type=Path, default=Path("results/runs"), help="folder of the runs")
    parser.add_argument("--out", type=Path, default=Path("results/measured"), help="folder of the table")
    given = parser.parse_args(arguments)
    if given.examples < 1:
        raise UserError("--examples must be one or more.")
    print(measure(given.sweep, scale_of(given.scale), given.examples, given.layers, given.runs, given.out))
    return 0


if __name__ == "__main__":
    sys.exit(main())
