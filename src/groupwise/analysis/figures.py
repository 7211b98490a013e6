"""Draws the paper's figures from measured rows:  python -m groupwise.analysis.figures NAME...|all [--out F]"""

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd

from groupwise.analysis.benchmark_rows import cells, read_rows
from groupwise.analysis.figure_style import (
    References,
    plain_style,
    read_companion,
    read_figure_rows,
    with_settings,
    write_figure,
)
from groupwise.analysis.results import Folders, Measured, make_each, read_floors, read_paper, run_in_words
from groupwise.analysis.run_figures import (
    ACCURACY,
    draw_adaptive_vs_fixed,
    draw_against_time,
    draw_epochs,
    draw_gradnorm_cifar,
    draw_gradnorm_sst2,
    draw_quantile_budget,
    draw_target_quantile,
)
from groupwise.analysis.throughput_figure import draw, panels
from groupwise.errors import command, unknown
from groupwise.sweeps.cells import read_sweep


@dataclass(frozen=True)
class Kind:
    """The recipe of a figure from the rows of the sweep of its name.

    Attributes:
        draw: rows and other content -> figure.
        numbers: the columns that it needs.
        suffix: a key of `COMPANIONS`, if the figure shows several rows per run; empty if it shows the runs' own rows.
        paper: the paper's table with numbers for the figure's cells; empty if there is none.
    """

    draw: Callable[[pd.DataFrame, References], Any]
    numbers: tuple[str, ...] = (ACCURACY,)
    suffix: str = ""
    paper: str = ""


NORM = ("norm", "epoch")
NLL, TEXTS = ("test/nll",), ("test/bleu", "test/rougeL")
KINDS = {
    "adaptive_vs_fixed": Kind(draw_adaptive_vs_fixed, paper="adaptivity"),
    "target_quantile": Kind(draw_target_quantile),
    "quantile_budget": Kind(draw_quantile_budget),
    "runtime_nll": Kind(partial(draw_against_time, metrics=NLL), ("seconds", *NLL), "_curves"),
    "runtime_metrics": Kind(partial(draw_against_time, metrics=TEXTS), ("seconds", *TEXTS), "_curves"),
    "gradnorm_cifar": Kind(draw_gradnorm_cifar, NORM, "_norms"),
    "gradnorm_sst2": Kind(draw_gradnorm_sst2, NORM, "_norms"),
}
"""The paper's figures of training runs; the titles are in their sweeps."""
OURS = {"cifar_long": Kind(draw_epochs)}
"""Figures that the paper does not have."""
SPEED = {
    "throughput": "Figure 1: memory and throughput against batch size.",
    "runtime_breakdown": "Figure 1 on another machine configuration: memory and throughput against batch size.",
}
FIGURES = (*KINDS, *OURS, *SPEED)


@dataclass(frozen=True)
class Drawn:
    """A figure of matplotlib with its caption as label, its title, the scale of its rows, and its runs.

    Figures of speed have no runs (None).
    """

    figure: Any
    title: str
    scale: str
    runs: Measured | None


def make(name: str, folders: Folders) -> Drawn:
    """Read the rows of the figure `name` and draw it.

    Raises:
        UserError: there is no such figure, it has no rows, or they are invalid.
    """
    if name not in FIGURES:
        raise unknown("figure", name, FIGURES)
    if name in SPEED:
        shown = panels(name, cells(read_rows(folders.measured / "benchmarks" / "throughput.csv")))
        with plain_style():
            return Drawn(draw(shown), SPEED[name], shown.scale, None)
    kind = (KINDS | OURS)[name]
    runs = read_figure_rows(name, folders, () if kind.suffix else kind.numbers)
    rows = runs.rows
    if kind.suffix:
        rows = read_companion(name, runs, folders.measured, kind.suffix, kind.numbers)
    with plain_style():
        figure = kind.draw(with_settings(rows), _references(kind, runs, folders))
    said = "; ".join(dict.fromkeys(map(run_in_words, runs.rows.to_dict("records"))))
    flags = Counter(flag for cell in runs.expected for flag in runs.flags_of(cell))
    said += "".join(f". Flag: {flag} (cells: {count})" for flag, count in flags.items())
    figure.set_label(f"{figure.get_label()} Ours: {said}.")
    return Drawn(figure, read_sweep(folders.sweeps / f"{name}.yaml").title, runs.scale, runs)


def _references(kind: Kind, runs: Measured, folders: Folders) -> References:
    floors = read_floors(folders.measured)
    missing = pd.DataFrame({"cell": sorted(set(runs.expected) - set(runs.rows["cell"]))})
    if not kind.paper:
        return References(floors, missing=missing)
    cells = {tuple(sorted(cell.split())): cell for cell in runs.expected}
    paper = read_paper(kind.paper, folders.paper)
    paper = paper.assign(cell=[cells.get(tuple(sorted(cell.split())), "") for cell in paper["cell"]])
    return References(floors, paper[(paper["cell"] != "") & paper["value"].notna()], missing)


@command
def main(arguments: Sequence[str] | None = None, folders: Folders | None = None) -> int:
    """The command line; returns the exit code, 2 if a figure could not be made. The others are still made."""
    parser = argparse.ArgumentParser(prog="python -m groupwise.analysis.figures", description=__doc__)
    parser.add_argument("names", nargs="+", metavar="NAME", help=f"all, or of {', '.join(FIGURES)}")
    parser.add_argument("--out", type=Path, default=Path("results/figures"))
    given, folders = parser.parse_args(arguments), folders or Folders()

    def write(name: str) -> str:
        drawn = make(name, folders)
        written = write_figure(drawn.figure, drawn.title, given.out, name)
        return f"{name} (scale={drawn.scale}): {' '.join(map(str, written))}"

    return make_each(FIGURES if "all" in given.names else dict.fromkeys(given.names), write)


if __name__ == "__main__":
    sys.exit(main())
