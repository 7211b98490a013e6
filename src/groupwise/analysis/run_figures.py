"""Draws the figures of runs: accuracy by way of clipping, setting and time, and how gradient norms of layers move."""

from typing import Any, Literal

import numpy as np
import pandas as pd

from groupwise.analysis.figure_style import (
    BUDGET,
    CLIP,
    COLUMN,
    LEARNT,
    NOTHING,
    PAGE,
    PAPER,
    TASKS,
    WEAK,
    Beside,
    blank,
    draw_floor,
    head,
    mark_all,
    note,
    plain_style,
    rule,
    seeds_in_words,
    summary,
    whisker,
)
from groupwise.analysis.results import settings_of

ACCURACY = "valid/accuracy"
SPREAD = 0.22
"""Of the methods at one budget, in units of the distance between budgets."""
DODGE = 0.006
"""Offset of the two budgets to either side of a value of q, so that their intervals do not overlap."""
PAPERS = "*"
"""The mark of the paper's values."""


def draw_adaptive_vs_fixed(rows: pd.DataFrame, beside: Beside = NOTHING) -> Any:
    """Three ways of clipping at two budgets and without noise; the paper's values in a panel of their own."""
    table = summary(rows.assign(budget=_budgets(rows)), ["clip", "budget"], ACCURACY)
    budgets = [name for name in ("ε = 3", "ε = 8", "no noise") if name in set(table["budget"])]
    scale = rows["scale"].iloc[0]
    printed = _printed(beside.paper)
    methods = [name for name in CLIP if name in set(table["clip"])]
    with plain_style():
        figure = blank(PAGE if len(printed) else COLUMN, 2.5)
        panels = figure.subplots(
            1, 2 if len(printed) else 1, squeeze=False, width_ratios=[3, 2][: 1 + bool(len(printed))]
        )
        axes = panels[0, 0]
        floor = beside.floors.get(("cifar", ACCURACY))
        for place, name in enumerate(methods):
            own = table[table["clip"] == name].set_index("budget").reindex(budgets)
            x = [number + _shift(place, methods) for number in range(len(budgets))]
            whisker(axes, x, own, CLIP[name], joined=False, floor=floor)
            for at, mean in zip(x, own["mean"], strict=True):
                axes.annotate(f"{mean:.1f}", (at, mean), (4, 0), textcoords="offset points", fontsize=6, va="center")
        _columns(axes, budgets)
        head(axes, "CIFAR-10, here", scale)
        draw_floor(axes, floor)
        axes.legend(loc="best")
        if len(printed):
            _draw_printed(panels[0, 1], printed, methods)
        words = f"{seeds_in_words(table['n'])}."
        note(figure, scale, f"{words} Stars: the paper's means ± standard deviation." if len(printed) else words)
    return figure


def _shift(place: int, methods: list[str]) -> float:
    return SPREAD * (place - (len(methods) - 1) / 2)


def _columns(axes: Any, budgets: list[str]) -> None:
    axes.set_xticks(range(len(budgets)), budgets)
    axes.set_xlim(-0.5, len(budgets) - 0.4)
    axes.set(ylabel="validation accuracy (%)")
    rule(axes)


def _printed(paper: pd.DataFrame) -> pd.DataFrame:
    """The paper's values by ``clip`` and ``budget``."""
    settings = [settings_of(cell) for cell in paper["cell"]]
    return paper.assign(
        clip=[found["clip"] for found in settings], budget=[f"ε = {found['privacy.epsilon']}" for found in settings]
    )


def _draw_printed(axes: Any, printed: pd.DataFrame, methods: list[str]) -> None:
    budgets = list(dict.fromkeys(printed["budget"]))
    for place, name in enumerate(methods):
        own = printed[printed["clip"] == name]
        x = [budgets.index(budget) + _shift(place, methods) for budget in own["budget"]]
        bars = {"marker": PAPERS, "markersize": 7, "mfc": "white", "linestyle": "", "elinewidth": 0.9, "capsize": 2}
        axes.errorbar(x, own["value"], yerr=own["std"], color=CLIP[name].colour, **bars)
    _columns(axes, budgets)
    head(axes, "the paper, WRN16-4", PAPER)


def _budgets(rows: pd.DataFrame) -> pd.Series:
    quiet = rows["privacy"] == "noiseless" if "privacy" in rows else pd.Series(False, index=rows.index)
    return ("ε = " + rows["privacy.epsilon"].astype(str).str.removesuffix(".0")).mask(quiet, "no noise")


def draw_target_quantile(rows: pd.DataFrame, beside: Beside = NOTHING) -> Any:
    """Accuracy against the quantile of norms that thresholds follow, a panel a task."""
    table = _against(rows, "clip.target_quantile")
    scale = rows["scale"].iloc[0]
    with plain_style():
        figure = blank(PAGE, 2.3)
        for axes, task in zip(figure.subplots(1, 2), ("cifar", "sst2"), strict=True):
            here = table[table["task"] == task]
            floor = beside.floors.get((task, ACCURACY))
            _panel(axes, task, scale, here)
            for step, (budget, series) in zip((-DODGE, DODGE), BUDGET.items(), strict=True):
                own = here[here["budget"] == budget]
                if len(own):
                    whisker(axes, own["x"] + step, own, series, floor=floor)
            if len(here):
                axes.set(xlabel="target quantile q", xlim=(0, 1))
                draw_floor(axes, floor)
                axes.legend(loc="upper left")
        note(figure, scale, f"{seeds_in_words(table['n'])}.{_weak_in_words(beside)}")
    return figure


def draw_quantile_budget(rows: pd.DataFrame, beside: Beside = NOTHING) -> Any:
    """Accuracy against the share of the budget that the counts take: SST-2."""
    table = _against(rows, "clip.quantile_budget")
    table, scale = table[table["task"] == "sst2"], rows["scale"].iloc[0]
    shares = sorted(table["x"].unique())
    floor = beside.floors.get(("sst2", ACCURACY))
    with plain_style():
        figure = blank(COLUMN, 2.5)
        axes = figure.subplots()
        _panel(axes, "sst2", scale, table)
        for step, (budget, series) in zip((-8 * DODGE, 8 * DODGE), BUDGET.items(), strict=True):
            own = table[table["budget"] == budget]
            whisker(axes, [shares.index(x) + step for x in own["x"]], own, series, floor=floor)
        axes.set_xticks(range(len(shares)), [f"{100 * x:g}" for x in shares])
        axes.set(xlabel="share r of the budget for quantiles (%)")
        draw_floor(axes, floor)
        axes.legend()
        note(figure, scale, f"{seeds_in_words(table['n'])}.")
    return figure


def _weak_in_words(beside: Beside) -> str:
    return f" Hollow and grey: not {LEARNT:g} points above one answer for every input." if beside.floors else ""


def _against(rows: pd.DataFrame, key: str) -> pd.DataFrame:
    """`summary` by task, budget and `key`, which becomes the column ``x``; sorted by it."""
    rows = rows.assign(x=pd.to_numeric(rows[key]), budget=rows["privacy.epsilon"].astype(str).str.removesuffix(".0"))
    return summary(rows, ["task", "budget", "x"], ACCURACY).sort_values("x", kind="stable")


def _panel(axes: Any, task: str, scale: str, table: pd.DataFrame) -> None:
    head(axes, TASKS[task], scale)
    axes.set(ylabel="validation accuracy (%)")
    if table.empty:
        axes.text(0.5, 0.5, "not run", transform=axes.transAxes, ha="center", va="center")
        axes.set(xticks=[], yticks=[])
    rule(axes)


LABELS = {"test/nll": "test negative log-likelihood", "test/bleu": "test BLEU", "test/rougeL": "test ROUGE-L"}
UNITS = ((3600.0, "hours"), (60.0, "minutes"), (1.0, "seconds"))


def draw_runtime_nll(curves: pd.DataFrame, beside: Beside = NOTHING) -> Any:
    """Test loss against wall time of training."""
    return _against_time(curves, ["test/nll"], beside)


def draw_runtime_metrics(curves: pd.DataFrame, beside: Beside = NOTHING) -> Any:
    """BLEU and ROUGE-L against wall time of training."""
    return _against_time(curves, ["test/bleu", "test/rougeL"], beside)


def _against_time(curves: pd.DataFrame, metrics: list[str], beside: Beside) -> Any:
    scale, task = curves["scale"].iloc[0], str(curves["task"].iloc[0])
    size, unit = next(((size, unit) for size, unit in UNITS if curves["seconds"].max() >= 2 * size), UNITS[-1])
    times = curves.groupby(["clip", "step"])["seconds"].mean() / size
    counts: list[int] = []
    silent = False
    with plain_style():
        figure = blank(COLUMN if len(metrics) == 1 else PAGE, 2.4)
        for axes, metric in zip(figure.subplots(1, len(metrics), squeeze=False)[0], metrics, strict=True):
            table = summary(curves, ["clip", "step"], metric)
            counts += table["n"].tolist()
            floor = beside.floors.get((task, metric))
            weak = floor is not None and table["mean"].max() < floor + LEARNT
            silent = silent or weak
            for name, series in CLIP.items():
                own = table[table["clip"] == name].sort_values("step")
                if own.empty:
                    continue
                x = [times[name, step] for step in own["step"]]
                look = {"color": series.colour, "marker": series.marker, "markersize": 3.5, "linewidth": 1.1}
                look |= {"markerfacecolor": "white", "alpha": 0.45} if weak else {}
                axes.plot(x, own["mean"], label=series.label, **look)
                axes.fill_between(x, own["low"], own["high"], color=series.colour, alpha=0.18, linewidth=0)
            axes.set(xlabel=f"wall time of training ({unit})", ylabel=LABELS[metric])
            head(axes, TASKS.get(task, task), scale)
            axes.set_xlim(left=0)
            rule(axes)
            draw_floor(axes, floor)
            if weak:
                axes.text(0.5, 0.8, "uninformative", transform=axes.transAxes, ha="center", color=WEAK, fontsize=9)
        figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=len(CLIP))
        words = f"{seeds_in_words(pd.Series(counts))}; time without evaluations."
        note(figure, scale, words + (" Faded: no way of clipping beats one answer for every input." if silent else ""))
    return figure


QUANTILES = (0.25, 0.50, 0.75, 0.85)
QUANTILE_LINES: tuple[Literal[":", "-.", "--", "-"], ...] = (":", "-.", "--", "-")
"""Distinguished by line style, as colours stand for clipping modes."""
BARS = "#8fbbd9"
"""A light shade of adaptive per-layer clipping, in which the norms are measured."""
LINES = "#222222"
BINS = 40
TAILS = 0.005
"""Of the norms at either end, the share that the last bins take in."""


def draw_gradnorm_cifar(norms: pd.DataFrame, beside: Beside = NOTHING) -> Any:
    """A heatmap for each epoch: a row an example, a column a layer from input to output, darker for a larger norm."""
    from matplotlib.colors import LogNorm

    scale, epochs = norms["scale"].iloc[0], sorted(norms["epoch"].unique())
    positive = norms["norm"][norms["norm"] > 0]
    least = float(positive.quantile(0.01))
    colours = LogNorm(least, float(positive.max()))
    with plain_style():
        figure = blank(PAGE, 2.3)
        panels = figure.subplots(1, len(epochs), squeeze=False, sharey=True)[0]
        for axes, epoch in zip(panels, epochs, strict=True):
            table = norms[norms["epoch"] == epoch].pivot(index="example", columns="layer", values="norm")
            image = axes.imshow(
                np.maximum(table.to_numpy(), least), norm=colours, cmap="Blues", aspect="auto", interpolation="none"
            )
            axes.set(xticks=[0, table.shape[1] - 1], yticks=[])
            axes.set_title(f"epoch {epoch:.3g}")
            axes.set_xticklabels(["1", str(table.shape[1])])
        panels[0].set_ylabel(f"{norms['example'].nunique()} training examples")
        figure.colorbar(image, ax=panels, label="gradient norm", shrink=0.9, pad=0.01)
        mark_all(figure, scale)
        note(figure, scale, "Columns: layers from input (left) to output (right).")
    return figure


def draw_gradnorm_sst2(norms: pd.DataFrame, beside: Beside = NOTHING) -> Any:
    """Histograms, a row a layer and a column an epoch, with dashed lines at four quantiles."""
    scale, epochs = norms["scale"].iloc[0], sorted(norms["epoch"].unique())
    layers = chosen_layers(norms)
    with plain_style():
        figure = blank(PAGE, 1.05 * len(layers) + 0.7)
        grid = figure.subplots(len(layers), len(epochs), squeeze=False, sharex="row")
        for line, (_, name) in zip(grid, layers, strict=True):
            own = norms[norms["name"] == name]
            positive = own["norm"][own["norm"] > 0]
            edges = np.geomspace(float(positive.quantile(TAILS)), float(positive.quantile(1 - TAILS)), BINS + 1)
            for axes, epoch in zip(line, epochs, strict=True):
                values = own["norm"][own["epoch"] == epoch].to_numpy()
                axes.hist(np.clip(values, edges[0], edges[-1]), bins=edges, color=BARS)
                for share, dashes in zip(QUANTILES, QUANTILE_LINES, strict=True):
                    axes.axvline(np.quantile(values, share), color=LINES, linestyle=dashes, linewidth=0.8)
                axes.set(yticks=[], xscale="log")
                axes.minorticks_off()
            line[0].set_ylabel(_short(name), fontsize=6.0)
        for axes, epoch in zip(grid[0], epochs, strict=True):
            axes.set_title(f"epoch {epoch:.3g}")
        _legend(figure)
        mark_all(figure, scale)
        examples = norms["example"].nunique()
        note(
            figure,
            scale,
            f"Gradient norms (logarithmic) of {examples:,} training examples; the outermost bins hold all beyond them.",
        )
    return figure


def chosen_layers(norms: pd.DataFrame) -> list[tuple[int, str]]:
    """The paper's four: the embedding, the value matrices of the middle and of the last block, the classifier.

    All layers where there are at most four, or none has "value" in its name.
    """
    layers = [
        (int(place), str(name))
        for place, name in norms[["layer", "name"]].drop_duplicates().sort_values("layer").itertuples(index=False)
    ]
    values = [layer for layer in layers if "value" in layer[1]]
    if len(layers) <= 4 or not values:
        return layers
    chosen = [layers[0], values[(len(values) - 1) // 2], values[-1], layers[-1]]
    return list(dict.fromkeys(chosen))


def _short(name: str) -> str:
    """A layer's name in two lines at most: its last part, and what it is part of."""
    parts = [part for part in name.split(".") if part not in ("roberta", "encoder", "attention", "self", "model")]
    return parts[-1] if len(parts) < 2 else f"{'.'.join(parts[:-1])}\n{parts[-1]}"


def _legend(figure: Any) -> None:
    from matplotlib.lines import Line2D

    lines = [Line2D([], [], color=LINES, linestyle=dashes, linewidth=0.8) for dashes in QUANTILE_LINES]
    labels = [f"{100 * share:g} % quantile" for share in QUANTILES]
    figure.legend(lines, labels, loc="outside upper left", ncols=len(lines))
