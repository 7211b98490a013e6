"""The paper's figures of speed and memory:  python -m groupwise.analysis.throughput_figure throughput

`throughput` is the paper's Figure 1, `runtime_breakdown` the same on another machine configuration (its appendix):
(a) memory against batch size, (b) throughput at the largest batch that fits a memory budget.
"""

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from groupwise.analysis.benchmark_rows import MACHINE, cells, in_words, read_rows, was_measured
from groupwise.analysis.figure_files import draw_files
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


@dataclass(frozen=True)
class Panels:
    """What the two panels show: lines of `cells` for one workload on one machine configuration.

    Attributes:
        memory: one line a method and batch, sorted.
        fitting: one line a method: its largest batch whose peak fits the budget.
        budget: bytes.
        absent: method -> why it is in neither.
        caption: what was measured, and where.
    """

    memory: pd.DataFrame
    fitting: pd.DataFrame
    budget: float
    absent: dict[str, str]
    caption: str


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
    )


def draw(axes: Any, shown: Panels) -> None:
    """Draw (a) and (b) into two axes."""
    left, right = axes
    left.figure.suptitle(shown.caption, fontsize=9)
    for method, (label, colour, marker) in SERIES.items():
        rows = shown.memory[shown.memory["method"] == method]
        if len(rows):
            left.plot(rows["batch"], rows["peak_bytes"] / GIB, color=colour, marker=marker, markersize=4, label=label)
    left.axhline(shown.budget / GIB, color="#999999", linewidth=0.8, linestyle="--", label="budget")
    left.set_xscale("log", base=2)
    left.set_xticks(sorted(shown.memory["batch"].unique()))
    left.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    left.set(title="(a) memory", xlabel="batch size", ylabel="peak memory (GiB)")
    left.set_ylim(bottom=0)
    left.legend(fontsize=7)
    base = shown.fitting["examples_per_second"].get("none", float("nan"))
    for place, (method, (_, colour, _)) in enumerate(SERIES.items()):
        if method not in shown.fitting.index:
            right.annotate(
                " not run" if method in shown.absent else " no batch fits", (0, place), va="center", fontsize=7
            )
            continue
        batch, speed = shown.fitting.loc[method, "batch"], shown.fitting.loc[method, "examples_per_second"]
        right.barh(place, speed, color=colour)
        share = "" if pd.isna(base) or method == "none" else f", {speed / base:.2f} of non-private"
        right.annotate(f" batch {batch:g}{share}", (speed, place), va="center", fontsize=7)
    right.set_yticks(range(len(SERIES)), [label for label, _, _ in SERIES.values()])
    right.invert_yaxis()
    right.margins(x=0.6)
    right.set_xlim(left=0)
    right.set(title=f"(b) throughput in {shown.budget / GIB:g} GiB", xlabel="examples/s")


def make_figure(
    name: str, rows: Path, folder: Path, *, workload: str, budget: float, chosen: dict[str, str]
) -> tuple[list[Path], Panels]:
    """Read the rows, draw the figure `name` and write its files; `chosen` picks a machine by columns of `MACHINE`.

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
    return draw_files(folder, name, 2, lambda axes: draw(axes, shown)), shown


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m groupwise.analysis.throughput_figure")
    parser.add_argument("name", choices=FIGURES)
    parser.add_argument("--rows", type=Path, default=Path("results/measured/benchmarks/throughput.csv"))
    parser.add_argument("--out", type=Path, default=Path("results/figures"))
    parser.add_argument("--workload", default="gpt2")
    parser.add_argument("--budget", type=float, default=4.0, help="memory of panel (b), GiB")
    for column in MACHINE:
        parser.add_argument(f"--{column}", help=f"only rows of this {column}")
    given = parser.parse_args(arguments)
    chosen = {column: value for column in MACHINE if (value := getattr(given, column)) is not None}
    try:
        if not given.budget > 0:
            raise UserError(f"--budget={given.budget:g} is no memory: give GiB above zero.")
        written, shown = make_figure(
            given.name, given.rows, given.out, workload=given.workload, budget=given.budget * GIB, chosen=chosen
        )
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
