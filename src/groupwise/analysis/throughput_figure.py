"""Draws the paper's figures of speed and memory.

`throughput` is the paper's Figure 1, `runtime_breakdown` the same on another machine configuration (in its appendix).
Both show, against the batch size, (a) peak memory and (b) throughput relative to non-private training of the same
round.
"""

from dataclasses import dataclass
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from groupwise.analysis.benchmark_rows import MACHINE, in_words, was_measured
from groupwise.analysis.benchmark_tables import WORKLOADS
from groupwise.analysis.figure_style import GREY, PAGE, PAPER, TIMED, Series, finish, head, rule
from groupwise.errors import UserError

FIGURES = {"throughput": 0, "runtime_breakdown": 1}
"""The position of a figure's machine configuration: GPUs first, then by number of threads, float32 first."""
BASE, AGAIN = "none", "none_again"
"""Non-private training, and its repetition in each round. How far their ratio is from 1 shows the resolution."""
SERIES = {name: TIMED[name] for name in (BASE, "adaptive_layer", "ghost", "flat")}
SERIES["opacus_hooks"] = Series("flat, materialised (Opacus)", "#8c510a", "v")
"""The methods in the figures; ours have the colours of their modes."""
GIB = 2**30
DEPTH = 12
"""Layers of the paper's GPT-2."""
PAPER_SHARE = 0.85
"""The paper, below Figure 1: with per-layer clipping "the throughput gap is less than 15%"."""
SHOWN = ("gpt2_64", "gpt2")
"""Workloads; the first with enough machine configurations is shown."""
DODGE = 1.06
"""Each method is shifted to the right by this factor, so that intervals do not overlap."""


@dataclass(frozen=True)
class Panels:
    """The content of the two panels: lines of `cells` for one workload on one machine configuration.

    Attributes:
        lines: one per method and batch, sorted.
        again: lines of the repeated baseline; empty if it was not run.
        absent: method -> why it is missing.
        ours: lines of our methods, here and on GPUs, for their ratios with noise.
        caption: what was measured, and where.
        scale: "paper" for a model of full depth on a GPU, else "reduced".
    """

    lines: pd.DataFrame
    again: pd.DataFrame
    ours: pd.DataFrame
    absent: dict[str, str]
    caption: str
    scale: str


def panels(name: str, table: pd.DataFrame) -> Panels:
    """Choose the lines of the figure `name` from `cells`.

    They are of the first workload with non-private training at two or more batch sizes on enough machine
    configurations, and of its deepest model.

    Raises:
        UserError: there are too few.
    """
    base = table[(table["method"] == BASE) & was_measured(table)]
    base = base.groupby(["workload", *MACHINE, "layers"]).filter(lambda rows: rows["batch"].nunique() > 1)
    for workload in SHOWN:
        depths = base[base["workload"] == workload].groupby(list(MACHINE))["layers"].max()
        known = sorted(depths.index, key=lambda at: (at[0] != "cuda", at[2], str(at[1]), at[3] != "float32", at[3]))
        if len(known) > FIGURES[name]:
            machine = known[FIGURES[name]]
            break
    else:
        raise UserError(
            f"The figure {name} needs {' or '.join(SHOWN)} at two batch sizes on "
            f"{'a second' if FIGURES[name] else 'a'} machine configuration (device, hardware, threads, dtype): run "
            "python -m benchmarks.throughput there."
        )
    here = table[(table["workload"] == workload) & (table["layers"] == depths[machine])]
    here = here[here[list(MACHINE)].apply(tuple, axis=1) == machine]
    measured = here[was_measured(here)].sort_values(["method", "batch", "peak_bytes"])
    measured = measured.drop_duplicates(["method", "batch"])
    absent = {method: "not measured" for method in SERIES if method not in set(measured["method"])}
    absent |= {row.method: row.status for row in here[~was_measured(here)].itertuples() if row.method in absent}
    ours = (
        table["method"].isin({*SERIES} - {BASE, "opacus_hooks"}) & table["workload"].isin(SHOWN) & was_measured(table)
    )
    return Panels(
        measured[measured["method"].isin(SERIES)],
        measured[measured["method"] == AGAIN],
        table[ours & ((table["device"] == "cuda") | table.index.isin(measured.index))].sort_values(
            "device", kind="stable"
        ),
        absent,
        f"{WORKLOADS.get(workload, workload)}, {depths[machine]:g} layers, on {in_words(here.iloc[0])}",
        PAPER if depths[machine] >= DEPTH and machine[0] == "cuda" else "reduced",
    )


def draw(shown: Panels) -> Any:
    """The figure: (a) memory, (b) throughput."""
    figure = Figure(figsize=(PAGE, 2.2))
    left, right = figure.subplots(1, 2)
    _memory(left, shown)
    _throughput(right, shown)
    for axes, title in ((left, "(a) memory"), (right, "(b) throughput")):
        axes.set_xscale("log", base=2)
        axes.set_xticks(sorted(shown.lines["batch"].unique()))
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.minorticks_off()
        axes.set(xlabel="batch size")
        head(axes, title, shown.scale)
        rule(axes)
    finish(figure, shown.scale, _words(shown))
    return figure


def _words(shown: Panels) -> str:
    base = shown.lines[shown.lines["method"] == BASE].iloc[-1]
    rounds = shown.lines["rounds"].min()
    spans = shown.ours.groupby(["hardware", "method"], sort=False)["whole"].agg(["min", "max"]).itertuples()
    whole = [f"{SERIES[name].label} {least:.2f} to {most:.2f} on the {on}" for (on, name), least, most in spans]
    what = "One round" if rounds == 1 else f"Medians of {rounds:g} rounds and [least..most]"
    parts = [
        f"{shown.caption}.",
        "(a) Plain training stores three gradients of the tied table: the embedding's, the head's, and their sum.",
        "(b) Without noise, which is added once per logical batch and takes "
        f"{shown.lines.set_index('method')['noise_seconds'].drop('opacus_hooks', errors='ignore').max():.2g} s here. "
        f"{what}, each relative to non-private training in the same round, which "
        f"takes {base['batch'] / base['examples_per_second']:.2g} s a step at batch {base['batch']:g}. "
        f"Dotted: the paper's per-layer clipping, measured on a GPU, is above {PAPER_SHARE:g}. "
        f"With noise: {'; '.join(whole)}: see docs/benchmarks.md.",
    ]
    if len(shown.again):
        away = max(1 - shown.again["ratio_least"].min(), shown.again["ratio_most"].max() - 1)
        parts.append(f"Grey: repeated non-private training, up to {away:.3f} from 1.")
    if shown.absent:
        parts.append("; ".join(f"{SERIES[name].label}: {why}" for name, why in shown.absent.items()) + ".")
    return " ".join(parts)


def _memory(axes: Any, shown: Panels) -> None:
    for place, (method, series) in enumerate(SERIES.items()):
        rows = shown.lines[shown.lines["method"] == method]
        if len(rows):
            x = rows["batch"] * DODGE ** (place - (len(SERIES) - 1) / 2)
            look = {"color": series.colour, "marker": series.marker, "markersize": 3.5, "linewidth": 1.1}
            axes.plot(x, rows["peak_bytes"] / GIB, label=series.label, **look)
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
    axes.set(ylabel="throughput relative to\nnon-private, without noise")
    axes.set_ylim(bottom=0)
