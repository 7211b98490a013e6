"""Draws the paper's figures of speed and memory.

`throughput` is the paper's Figure 1, `runtime_breakdown` the same on another machine configuration (its appendix):
against the batch size (a) peak memory, and (b) throughput as a share of non-private training's in the same round.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from groupwise.analysis.benchmark_rows import MACHINE, cells, in_words, read_rows, was_measured
from groupwise.analysis.benchmark_tables import WORKLOADS
from groupwise.analysis.figure_style import (
    CLIP,
    GREY,
    PAGE,
    PAPER,
    Series,
    head,
    legend,
    note,
    rule,
)
from groupwise.errors import UserError

FIGURES = {"throughput": 0, "runtime_breakdown": 1}
"""The machine configuration of a figure, by position."""
BASE, AGAIN = "none", "none_again"
"""Non-private training, and the same once more in each round: how far its ratio strays from 1 is the resolution."""
SERIES = {
    BASE: CLIP["none"],
    "adaptive_layer": CLIP["adaptive_layer"],
    "ghost": CLIP["ghost"]._replace(label="flat, ghost"),
    "flat": CLIP["flat"]._replace(label="flat, book-keeping"),
    "opacus_hooks": Series("flat, materialised (Opacus)", "#8c510a", "v"),
}
"""The methods of the figures; ours in the colours that their modes have everywhere."""
GIB = 2**30
DEPTH = 12
"""Layers of the paper's GPT-2."""
PAPER_SHARE = 0.85
"""The paper, below Figure 1: with per-layer clipping "the throughput gap is less than 15%"."""
SHOWN = ("gpt2_64", "gpt2")
"""The workloads; the first with enough machine configurations is shown."""
DODGE = 1.06
"""Shift of each method to the right of the one before, so that their intervals can be distinguished."""


@dataclass(frozen=True)
class Panels:
    """The content of the two panels: lines of `cells` for one workload on one machine configuration.

    Attributes:
        lines: one line a method and batch, sorted.
        again: the same of the repeated baseline; empty where it was not run.
        absent: method -> why it is in neither.
        caption: what was measured, and where.
        scale: "paper" for a model of full depth on a GPU, else what is less.
    """

    lines: pd.DataFrame
    again: pd.DataFrame
    absent: dict[str, str]
    caption: str
    scale: str

    @property
    def resolution(self) -> float:
        """The furthest that a round of the repeated baseline is from 1; NaN where it was not run."""
        away = pd.concat([1 - self.again["ratio_least"], self.again["ratio_most"] - 1])
        return float(away.max())


def configurations(table: pd.DataFrame) -> list[tuple[Any, ...]]:
    """The machine configurations (`MACHINE`) in `table`: GPUs first, then by number of threads, float32 first."""
    known = {tuple(values) for values in table[list(MACHINE)].itertuples(index=False)}
    return sorted(known, key=lambda at: (at[0] != "cuda", at[2], str(at[1]), at[3] != "float32", str(at[3])))


def _at_several_batches(table: pd.DataFrame) -> pd.DataFrame:
    """The rows of machine configurations on which more than one batch size was measured."""
    return table.groupby(list(MACHINE)).filter(lambda rows: rows["batch"].nunique() > 1)


def panels(table: pd.DataFrame, *, workload: str, machine: tuple[Any, ...]) -> Panels:
    """Choose the lines of both panels from `cells`, of the deepest model measured at more than one batch size.

    Raises:
        UserError: non-private training was not measured there at two batch sizes or more.
    """
    here = table[(table["workload"] == workload) & (table[list(MACHINE)].apply(tuple, axis=1) == machine)]
    base = here[(here["method"] == BASE) & was_measured(here)]
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
    lines = measured[measured["method"].isin(SERIES)]
    absent = {name: "not measured" for name in SERIES if name not in set(lines["method"])}
    absent |= {row.method: row.status for row in here[~was_measured(here)].itertuples() if row.method in absent}
    return Panels(
        lines,
        measured[measured["method"] == AGAIN],
        absent,
        f"{WORKLOADS.get(workload, workload)}, {max(depths):g} layers, on {in_words(machine)}",
        PAPER if max(depths) >= DEPTH and machine[0] == "cuda" else "reduced",
    )


def draw(shown: Panels) -> Any:
    """The figure: (a) memory, (b) throughput."""
    figure = Figure(figsize=(PAGE, 2.2))
    left, right = figure.subplots(1, 2)
    _memory(left, shown)
    _throughput(right, shown)
    legend(figure)
    note(figure, shown.scale, _words(shown))
    return figure


def _words(shown: Panels) -> str:
    base = shown.lines[shown.lines["method"] == BASE].iloc[-1]
    rounds = shown.lines["rounds"].min()
    what = "One round" if rounds == 1 else f"Medians of {rounds:g} rounds and [least..most]"
    parts = [
        f"{shown.caption}.",
        f"(b) {what}, each over non-private training in the same round, which "
        f"takes {base['batch'] / base['examples_per_second']:.2g} s a step at batch {base['batch']:g}. "
        f"Dotted: the paper's per-layer clipping is above {PAPER_SHARE:g}.",
    ]
    if len(shown.again):
        parts.append(f"Grey: non-private training against itself, up to {shown.resolution:.3f} from 1.")
    if shown.absent:
        parts.append("; ".join(f"{SERIES[name].label}: {why}" for name, why in shown.absent.items()) + ".")
    return " ".join(parts)


def _batches(axes: Any, shown: Panels, title: str) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(sorted(shown.lines["batch"].unique()))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.minorticks_off()
    axes.set(xlabel="batch size")
    head(axes, title, shown.scale)
    rule(axes)


def _memory(axes: Any, shown: Panels) -> None:
    for method, series in SERIES.items():
        rows = shown.lines[shown.lines["method"] == method]
        if len(rows):
            look = {"color": series.colour, "marker": series.marker, "markersize": 3.5, "linewidth": 1.1}
            axes.plot(rows["batch"], rows["peak_bytes"] / GIB, label=series.label, **look)
    _batches(axes, shown, "(a) memory")
    axes.set(ylabel="peak memory (GiB)", ylim=(0, 1.1 * shown.lines["peak_bytes"].max() / GIB))


def _throughput(axes: Any, shown: Panels) -> None:
    if len(shown.again):
        band = (shown.again["batch"], shown.again["ratio_least"], shown.again["ratio_most"])
        axes.fill_between(*band, color=GREY, alpha=0.2, linewidth=0)
    axes.axhline(1.0, color=SERIES[BASE].colour, linewidth=1.1)
    private = [name for name in SERIES if name != BASE]
    for place, method in enumerate(private):
        rows = shown.lines[shown.lines["method"] == method]
        if len(rows):
            series, ratio = SERIES[method], rows["ratio"]
            ends = [ratio - rows["ratio_least"], rows["ratio_most"] - ratio]
            x = rows["batch"] * DODGE ** (place - (len(private) - 1) / 2)
            axes.plot(x, ratio, color=series.colour, linewidth=0.8, alpha=0.6)
            bars = {"marker": series.marker, "markersize": 3.5, "linestyle": "", "elinewidth": 0.9, "capsize": 2}
            axes.errorbar(x, ratio, yerr=ends, color=series.colour, **bars)
    axes.axhline(PAPER_SHARE, color=GREY, linewidth=0.8, linestyle=":")
    _batches(axes, shown, "(b) throughput")
    axes.set(ylabel="share of non-private")
    axes.set_ylim(bottom=0)


def make_figure(name: str, rows: Path) -> tuple[Any, Panels]:
    """Read the rows and draw the figure `name`, of the first workload that has enough machine configurations.

    Raises:
        UserError: no rows; fewer machine configurations than the figure needs.
    """
    table, place = cells(read_rows(rows)), FIGURES[name]
    for one in SHOWN:
        known = configurations(_at_several_batches(table[table["workload"] == one]))
        if len(known) > place:
            shown = panels(table, workload=one, machine=known[place])
            return draw(shown), shown
    raise UserError(
        f"The figure {name} needs {' or '.join(SHOWN)} on {'a' if place == 0 else 'a second'} machine configuration "
        f"(device, hardware, threads, dtype), which {rows} lacks: run python -m benchmarks.throughput there."
    )
