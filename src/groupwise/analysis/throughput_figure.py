"""Draws the paper's figures of speed and memory:  python -m groupwise.analysis.throughput_figure throughput

`throughput` is the paper's Figure 1, `runtime_breakdown` the same on another machine configuration (its appendix):
(a) memory against batch size, (b) throughput at the largest batch that fits a memory budget.
"""

import argparse
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pandas as pd

from groupwise.analysis.benchmark_rows import MACHINE, cells, in_words, read_rows, was_measured
from groupwise.analysis.figure_style import PAPER, blank, note, plain_style, shade, write_figure
from groupwise.errors import UserError

FIGURES = {"throughput": 0, "runtime_breakdown": 1}
"""Which of the machine configurations a figure shows, unless told."""
SERIES = {
    "none": ("non-private", "#444444", "o"),
    "adaptive_layer": ("adaptive per layer", "#0072b2", "s"),
    "ghost": ("flat, ghost", "#009e73", "^"),
    "flat": ("flat, book-keeping", "#e69f00", "D"),
    "opacus_hooks": ("flat, materialised (Opacus)", "#d55e00", "v"),
}
"""The methods of the figures: label, colour (told apart by the colour-blind), marker."""
GIB = 2**30
BUDGET = 4.0 * GIB
"""Memory of panel (b), bytes, unless told."""
DEPTH = 12
"""Layers of the paper's GPT-2."""
ROWS = Path("results/measured/benchmarks/throughput.csv")


@dataclass(frozen=True)
class Panels:
    """What the two panels show: lines of `cells` for one workload on one machine configuration.

    Attributes:
        memory: one line a method and batch, sorted.
        fitting: one line a method: its largest batch whose peak fits the budget.
        budget: bytes.
        absent: method -> why it is in neither.
        caption: what was measured, and where.
        scale: "paper" for a model of full depth on a GPU, else what is less.
    """

    memory: pd.DataFrame
    fitting: pd.DataFrame
    budget: float
    absent: dict[str, str]
    caption: str
    scale: str


def configurations(table: pd.DataFrame) -> list[tuple[Any, ...]]:
    """The machine configurations (`MACHINE`) in `table`: GPUs first, then by number of threads."""
    known = {tuple(values) for values in table[list(MACHINE)].itertuples(index=False)}
    return sorted(known, key=lambda at: (at[0] != "cuda", at[2], str(at[1]), str(at[3])))


def panels(table: pd.DataFrame, *, workload: str, machine: tuple[Any, ...], budget: float) -> Panels:
    """Choose the lines of both panels from `cells`, of the deepest model measured at more than one batch size.

    Raises:
        UserError: non-private training was not measured there at two batch sizes or more.
    """
    here = table[(table["workload"] == workload) & (table[list(MACHINE)].apply(tuple, axis=1) == machine)]
    here = here[here["method"].isin(SERIES)]
    base = here[(here["method"] == "none") & was_measured(here)]
    depths = [depth for depth, rows in base.groupby("layers") if rows["batch"].nunique() > 1]
    if not depths:
        raise UserError(
            f"The figure needs {workload} without privacy at two batch sizes or more on {in_words(machine)}: run "
            f"python -m benchmarks.throughput workload={workload} batch=1,2,4,8."
        )
    here = here[here["layers"] == max(depths)]
    measured = (
        here[was_measured(here)].sort_values(["method", "batch", "peak_bytes"]).drop_duplicates(["method", "batch"])
    )
    fits = measured[measured["peak_bytes"] <= budget]
    largest = fits.sort_values("batch").drop_duplicates("method", keep="last").set_index("method")
    absent = {name: "not measured" for name in SERIES if name not in set(measured["method"])}
    absent |= {row.method: row.status for row in here[~was_measured(here)].itertuples() if row.method in absent}
    return Panels(
        measured,
        largest.reindex([name for name in SERIES if name in largest.index]),
        budget,
        absent,
        f"{workload}, {max(depths):g} layers, on {in_words(machine)}",
        PAPER if max(depths) >= DEPTH and machine[0] == "cuda" else "reduced",
    )


def draw(shown: Panels) -> Any:
    """The figure: (a) memory, (b) throughput."""
    with plain_style():
        figure = blank(9.0, 3.6)
        left, right = figure.subplots(1, 2)
        for axes in (left, right):
            shade(axes, shown.scale)
        _memory(left, shown)
        _throughput(right, shown)
        note(figure, shown.scale, f"{shown.caption}.")
    return figure


def _memory(axes: Any, shown: Panels) -> None:
    for method, (label, colour, marker) in SERIES.items():
        rows = shown.memory[shown.memory["method"] == method]
        if len(rows):
            axes.plot(rows["batch"], rows["peak_bytes"] / GIB, color=colour, marker=marker, markersize=4, label=label)
    axes.axhline(shown.budget / GIB, color="#999999", linewidth=0.8, linestyle="--", label="budget")
    axes.set_xscale("log", base=2)
    axes.set_xticks(sorted(shown.memory["batch"].unique()))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.minorticks_off()
    axes.set(title="(a) memory", xlabel="batch size", ylabel="peak memory (GiB)")
    axes.set_ylim(0, 1.4 * max(shown.memory["peak_bytes"].max(), shown.budget) / GIB)  # room for the legend
    axes.legend(fontsize=7, loc="upper left", ncols=2)


def _throughput(axes: Any, shown: Panels) -> None:
    base = shown.fitting["examples_per_second"].get("none", float("nan"))
    reduced = {} if shown.scale == PAPER else {"hatch": "////", "edgecolor": "white", "linewidth": 0}
    beside: dict[str, Any] = {"xytext": (3, 0), "textcoords": "offset points", "va": "center", "fontsize": 7}
    for place, (method, (_, colour, _)) in enumerate(SERIES.items()):
        if method not in shown.fitting.index:
            axes.annotate("not run" if method in shown.absent else "no batch fits", (0, place), **beside)
            continue
        batch, speed = shown.fitting.loc[method, "batch"], shown.fitting.loc[method, "examples_per_second"]
        axes.barh(place, speed, color=colour, **reduced)
        share = "" if pd.isna(base) or method == "none" else f", {speed / base:.2f} of non-private"
        axes.annotate(f"batch {batch:g}{share}", (speed, place), **beside)
    axes.set_yticks(range(len(SERIES)), [label for label, _, _ in SERIES.values()])
    axes.invert_yaxis()
    axes.margins(x=0.75)
    axes.set_xlim(left=0)
    axes.set(title=f"(b) throughput in {shown.budget / GIB:g} GiB", xlabel="examples/s")


def make_figure(
    name: str,
    rows: Path = ROWS,
    *,
    workload: str = "gpt2",
    budget: float = BUDGET,
    chosen: Mapping[str, str] = MappingProxyType({}),
) -> tuple[Any, Panels]:
    """Read the rows and draw the figure `name`; `chosen` picks a machine by columns of `MACHINE`.

    Raises:
        UserError: no rows; fewer machine configurations than the figure needs.
    """
    table = cells(read_rows(rows))
    table = table[table["workload"] == workload]
    for column, value in chosen.items():
        table = table[table[column].astype(str) == value]
    known, place = configurations(table), 0 if chosen else FIGURES[name]
    if len(known) <= place:
        raise UserError(
            f"The figure {name} needs {workload} on {'a' if place == 0 else 'a second'} machine configuration (device, "
            f"hardware, threads, dtype), and {rows} has {len(known)}: run python -m benchmarks.throughput there."
        )
    shown = panels(table, workload=workload, machine=known[place], budget=budget)
    return draw(shown), shown


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m groupwise.analysis.throughput_figure")
    parser.add_argument("name", choices=FIGURES)
    parser.add_argument("--rows", type=Path, default=ROWS)
    parser.add_argument("--out", type=Path, default=Path("results/figures"))
    parser.add_argument("--workload", default="gpt2")
    parser.add_argument("--budget", type=float, default=BUDGET / GIB, help="memory of panel (b), GiB")
    for column in MACHINE:
        parser.add_argument(f"--{column}", help=f"only rows of this {column}")
    given = parser.parse_args(arguments)
    chosen = {column: value for column in MACHINE if (value := getattr(given, column)) is not None}
    try:
        if not given.budget > 0:
            raise UserError(f"--budget={given.budget:g} is no memory: give GiB above zero.")
        figure, shown = make_figure(
            given.name, given.rows, workload=given.workload, budget=given.budget * GIB, chosen=chosen
        )
        written = write_figure(figure, given.out, given.name)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(shown.caption)
    print(shown.fitting[["batch", "examples_per_second", "peak_bytes"]].to_string())
    for method, reason in shown.absent.items():
        print(f"{method}: {reason}")
    print(*written)
    return 0


if __name__ == "__main__":
    sys.exit(main())
