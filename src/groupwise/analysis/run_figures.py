"""Draws the figures of training runs: accuracy by mode, setting and time, and gradient norms of layers."""

from typing import Any, Literal

import numpy as np
import pandas as pd
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure

from groupwise.analysis.figure_style import (
    BUDGETS,
    CLIP,
    COLUMN,
    LEARNT,
    PAGE,
    PAPER,
    TASKS,
    TIMED,
    WEAK,
    References,
    draw_floor,
    finish,
    head,
    rule,
    seeds_in_words,
    summary,
    whisker,
    with_settings,
)

ACCURACY = "valid/accuracy"
SPREAD = 0.22
"""Offset between methods at one budget, in units of the distance between budgets."""
DODGE = 0.006
"""Offset of the two budgets to either side of a value of q, so that their intervals do not overlap."""
PAPERS = "*"
"""The marker of the paper's values."""


def draw_adaptive_vs_fixed(rows: pd.DataFrame, references: References) -> Any:
    """Three modes at two budgets and without noise. The paper's values are in a second panel with the same axis."""
    rows = rows.assign(budget=_budgets(rows))
    table = summary(rows, ["clip", "budget"], ACCURACY)
    budgets = [name for name in ("ε = 3", "ε = 8", "no noise") if name in set(table["budget"])]
    scale, floor = rows["scale"].iloc[0], references.floors.get(("cifar", ACCURACY))
    printed = with_settings(references.paper)
    printed = printed.assign(budget=_budgets(printed))
    methods = [name for name in CLIP if name in set(table["clip"])]
    figure = Figure(figsize=(PAGE, 2.4))
    here, paper = figure.subplots(1, 2, sharey=True, width_ratios=[3, 2])
    for place, name in enumerate(methods):
        own = table[table["clip"] == name].set_index("budget").reindex(budgets)
        shift = SPREAD * (place - (len(methods) - 1) / 2)
        whisker(here, np.arange(len(budgets)) + shift, own, CLIP[name], joined=False, floor=floor)
        seeds = rows[rows["clip"] == name]
        x = [budgets.index(budget) + shift + SPREAD / 3 for budget in seeds["budget"]]
        here.plot(x, seeds[ACCURACY], ".", color=CLIP[name].colour, markersize=2.5)
        own = printed[printed["clip"] == name]
        x = [budgets.index(budget) + shift for budget in own["budget"]]
        bars = {"marker": PAPERS, "markersize": 7, "mfc": "white", "linestyle": "", "elinewidth": 0.9, "capsize": 2}
        paper.errorbar(x, own["value"], yerr=own["std"], color=CLIP[name].colour, **bars)
    for axes, shown, title, of in ((here, 3, "CIFAR-10, here", scale), (paper, 2, "the paper, WRN16-4", PAPER)):
        axes.set_xticks(range(shown), budgets[:shown])
        axes.set_xlim(-0.5, shown - 0.5)
        head(axes, title, of)
        rule(axes)
    here.set(ylabel="validation accuracy (%)")
    draw_floor(here, floor)
    stars = "Stars: the paper's Table 11, with standard deviations; its Figure 3 prints no numbers."
    finish(figure, scale, f"{seeds_in_words(table['n'])}; dots: single seeds. {stars}")
    return figure


def _budgets(rows: pd.DataFrame) -> pd.Series:
    quiet = rows["privacy"] == "noiseless" if "privacy" in rows else pd.Series(False, index=rows.index)
    return ("ε = " + rows["privacy.epsilon"].astype(str).str.removesuffix(".0")).mask(quiet, "no noise")


def draw_epochs(rows: pd.DataFrame, references: References) -> Any:
    """Accuracy on CIFAR-10 against epochs of training, with one line per mode and one panel per budget."""
    rows = rows.assign(epochs=pd.to_numeric(rows["train.epochs"]), budget=_budgets(rows))
    rows["rate"] = pd.to_numeric(rows["optim.learning_rate"]).map("{:g}".format)
    table, scale = summary(rows, ["clip", "budget", "epochs"], ACCURACY), rows["scale"].iloc[0]
    ticks = sorted(table["epochs"].unique())
    figure = Figure(figsize=(PAGE, 2.4))
    for axes, budget in zip(figure.subplots(1, 2, sharey=True), ("ε = 3", "ε = 8"), strict=True):
        for place, name in enumerate(("flat", "fixed_layer", "adaptive_layer")):
            own = table[(table["clip"] == name) & (table["budget"] == budget)].sort_values("epochs")
            if len(own):
                whisker(axes, own["epochs"] * (1 + 0.02 * (place - 1)), own, CLIP[name])
        axes.set_xscale("log")
        axes.set_xticks(ticks, [f"{epochs:g}" for epochs in ticks])
        axes.minorticks_off()
        axes.set(xlabel="epochs", xlim=(ticks[0] / 1.2, ticks[-1] * 1.2))
        head(axes, f"CIFAR-10, {budget}", scale)
        rule(axes)
    figure.axes[0].set(ylabel="validation accuracy (%)")
    words = f"{seeds_in_words(table['n'])}. The paper trains for 300 epochs."
    words += " Differences between modes are paired by seed."
    varied = rows[rows.groupby(["clip", "budget"])["rate"].transform("nunique") > 1]
    varied = varied.sort_values("epochs").drop_duplicates(["clip", "budget", "epochs"])
    words += _listed("Learning rates, by number of epochs", varied, "rate")
    words += _listed("Not run, numbers of epochs", with_settings(references.missing), "train.epochs")
    finish(figure, scale, words)
    return figure


def _listed(title: str, rows: pd.DataFrame, column: str) -> str:
    """A sentence with the values of a column by mode and budget, for a caption; empty without rows."""
    if rows.empty:
        return ""
    groups = rows.groupby(["clip", "privacy.epsilon"], sort=False)[column].agg(", ".join)
    return f" {title}: {'; '.join(f'{CLIP[clip].label}, ε = {of} ({text})' for (clip, of), text in groups.items())}."


def draw_target_quantile(rows: pd.DataFrame, references: References) -> Any:
    """Accuracy against the target quantile of thresholds, with one panel per task."""
    table, scale = _against(rows, "clip.target_quantile"), rows["scale"].iloc[0]
    figure = Figure(figsize=(PAGE, 2.3))
    panels = figure.subplots(1, 2)
    for axes, task in zip(panels, ("cifar", "sst2"), strict=True):
        here = table[table["task"] == task]
        _panel(axes, task, scale, here, here["x"], DODGE, references)
        if len(here):
            axes.set(xlabel="target quantile q", xlim=(0, 1))
    span = max(np.ptp(axes.get_ylim()) for axes in panels)
    for axes in panels:
        axes.set_ylim(np.mean(axes.get_ylim()) - span / 2, np.mean(axes.get_ylim()) + span / 2)
    finish(figure, scale, f"{seeds_in_words(table['n'])}.{_weak_in_words(table, references)}")
    return figure


def draw_quantile_budget(rows: pd.DataFrame, references: References) -> Any:
    """Accuracy against the share of the budget that the counts take: SST-2."""
    table = _against(rows, "clip.quantile_budget")
    table, scale = table[table["task"] == "sst2"], rows["scale"].iloc[0]
    shares = sorted(table["x"].unique())
    figure = Figure(figsize=(COLUMN, 2.5))
    axes = figure.subplots()
    _panel(axes, "sst2", scale, table, table["x"].map(shares.index), 8 * DODGE, references)
    axes.set_xticks(range(len(shares)), [f"{100 * x:g}" for x in shares])
    axes.set(xlabel="r, share of 1/σ² (%), not to scale")
    finish(figure, scale, f"{seeds_in_words(table['n'])}.{_weak_in_words(table, references)}")
    return figure


def _weak_in_words(table: pd.DataFrame, references: References) -> str:
    floors = table["task"].map(lambda task: references.floors.get((task, ACCURACY), np.nan))
    weak = (table["mean"] < floors + LEARNT).any()
    return f" Grey crosses: less than {LEARNT:g} points above a constant prediction." if weak else ""


def _against(rows: pd.DataFrame, key: str) -> pd.DataFrame:
    """`summary` by task, budget and `key`, which becomes the column ``x``; sorted by it."""
    rows = rows.assign(x=pd.to_numeric(rows[key]), budget=_budgets(rows))
    return summary(rows, ["task", "budget", "x"], ACCURACY).sort_values("x", kind="stable")


def _panel(
    axes: Any, task: str, scale: str, table: pd.DataFrame, places: pd.Series, step: float, references: References
) -> None:
    """The accuracy of one task at `places` on the x axis, the budgets `step` to either side of them."""
    head(axes, TASKS[task], scale)
    axes.set(ylabel="validation accuracy (%)")
    rule(axes)
    if table.empty:
        axes.text(0.5, 0.5, "not run", transform=axes.transAxes, ha="center", va="center")
        axes.set(xticks=[], yticks=[])
        return
    floor = references.floors.get((task, ACCURACY))
    for shift, series in zip((-step, step), BUDGETS, strict=True):
        own = table["budget"] == series.label
        if own.any():
            whisker(axes, places[own] + shift, table[own], series, floor=floor)
    draw_floor(axes, floor)


LABELS = {"test/nll": "test negative log-likelihood", "test/bleu": "test BLEU", "test/rougeL": "test ROUGE-L"}
UNITS = ((3600.0, "hours"), (60.0, "minutes"), (1.0, "seconds"))


def draw_against_time(curves: pd.DataFrame, references: References, metrics: tuple[str, ...]) -> Any:
    """Metrics on the test set against wall time of training, one panel each."""
    scale, task = curves["scale"].iloc[0], str(curves["task"].iloc[0])
    size, unit = next(((size, unit) for size, unit in UNITS if curves["seconds"].max() >= 2 * size), UNITS[-1])
    times = curves.groupby(["clip", "step"])["seconds"].mean() / size
    figure = Figure(figsize=(COLUMN if len(metrics) == 1 else PAGE, 2.4))
    floors = {metric: floor for (of, metric), floor in references.floors.items() if of == task and metric in curves}
    best = {metric: summary(curves, ["clip", "step"], metric)["mean"].max() for metric in floors}
    weak = any(best[metric] < floor + LEARNT for metric, floor in floors.items())
    words = f"ε = {curves['privacy.epsilon'].iloc[0]}; time without evaluations.{FADED if weak else ''}"
    for axes, metric in zip(figure.subplots(1, len(metrics), squeeze=False)[0], metrics, strict=True):
        table = summary(curves, ["clip", "step"], metric)
        for name, series in TIMED.items():
            own = table[table["clip"] == name].sort_values("step")
            if len(own):
                x = [times[name, step] for step in own["step"]]
                look = {"color": series.colour, "marker": series.marker, "markersize": 3.5, "linewidth": 1.1}
                look |= {"markerfacecolor": "white", "alpha": 0.45} if weak else {}
                axes.plot(x, own["mean"], label=series.label, **look)
                axes.fill_between(x, own["low"], own["high"], color=series.colour, alpha=0.18, linewidth=0)
        axes.set(xlabel=f"wall time of training ({unit})", ylabel=LABELS[metric])
        head(axes, TASKS.get(task, task), scale)
        axes.set_xlim(left=0)
        rule(axes)
        draw_floor(axes, floors.get(metric))
        if weak:
            axes.text(0.5, 0.8, "uninformative", transform=axes.transAxes, ha="center", color=WEAK, fontsize=9)
    finish(figure, scale, f"{seeds_in_words(table['n'])}; {words}")
    return figure


FADED = f" Faded: the generated texts of no mode score {LEARNT:g} points more than a constant prediction."
QUANTILES: dict[float, Literal[":", "-.", "--", "-"]] = {0.25: ":", 0.50: "-.", 0.75: "--", 0.85: "-"}
"""Distinguished by line style, as colours stand for clipping modes."""
BARS = "#8fbbd9"
"""A light shade of adaptive per-layer clipping, in which the norms are measured."""
LINES = "#222222"
BINS = 40
FAINT = 0.01  # the share of the norms that the heatmap leaves white
TAILS = 0.005
"""The share of the norms in the outermost bin at each end."""


def draw_gradnorm_cifar(norms: pd.DataFrame, references: References) -> Any:
    """A heatmap per epoch: one row per example, one column per layer, GroupNorm apart; darker means a larger norm."""
    scale, epochs = norms["scale"].iloc[0], sorted(norms["epoch"].unique())
    positive = norms["norm"][norms["norm"] > 0]
    colours = LogNorm(float(positive.quantile(FAINT)), float(positive.max()), clip=True)
    kind = np.where(norms["name"].str.contains("norm"), "norm", "conv.")
    kinds = norms["layer"].groupby(kind).unique()
    figure = Figure(figsize=(PAGE, 2.3))
    panels = figure.subplots(1, len(epochs), squeeze=False, sharey=True)[0]
    for axes, epoch in zip(panels, epochs, strict=True):
        table = norms[norms["epoch"] == epoch].pivot(index="example", columns="layer", values="norm")
        table = table[np.concatenate(kinds.to_list())]
        image = axes.imshow(table.to_numpy(), norm=colours, cmap="Blues", aspect="auto", interpolation="none")
        middles = np.cumsum([0, *map(len, kinds)])[:-1] + [len(layers) / 2 - 0.5 for layers in kinds]
        words = [f"{kind}\nmedian {np.median(table[layers]):.1f}" for kind, layers in kinds.items()]
        axes.set_xticks(middles, words, fontsize=6)
        axes.axvline(len(kinds.iloc[0]) - 0.5, color="white", linewidth=1.5)
        axes.set(yticks=[])
        head(axes, f"epoch {round(20 * epoch) / 20:g}", scale)
    panels[0].set_ylabel(f"{norms['example'].nunique()} training examples")
    figure.colorbar(image, ax=panels, label="gradient norm", shrink=0.9, pad=0.01, extend="min")
    figure.supxlabel("layer of each kind, input to output", fontsize=7.5)
    said = "Rows: examples. Columns: convolutions with the classifier, then GroupNorm, input to output."
    finish(figure, scale, f"{said} Norms below the {100 * FAINT:g} % quantile are white.")
    return figure


def draw_gradnorm_sst2(norms: pd.DataFrame, references: References) -> Any:
    """Histograms, one row per layer and one column per epoch, with dashed lines at four quantiles."""
    scale, epochs = norms["scale"].iloc[0], sorted(norms["epoch"].unique())
    layers = chosen_layers(norms)
    figure = Figure(figsize=(PAGE, 1.05 * len(layers) + 0.4))
    grid = figure.subplots(len(layers), len(epochs), squeeze=False, sharex="row")
    for line, name in zip(grid, layers, strict=True):
        own = norms[norms["name"] == name]
        positive = own["norm"][own["norm"] > 0]
        edges = np.geomspace(float(positive.quantile(TAILS)), float(positive.quantile(1 - TAILS)), BINS + 1)
        ticks = edges[[BINS // 5, 4 * BINS // 5]]
        for axes, epoch in zip(line, epochs, strict=True):
            values = own["norm"][own["epoch"] == epoch].to_numpy()
            axes.hist(np.clip(values, edges[0], edges[-1]), bins=edges, color=BARS)
            for share, dashes in QUANTILES.items():
                label = f"{100 * share:g} % quantile"
                axes.axvline(np.quantile(values, share), color=LINES, linestyle=dashes, linewidth=0.8, label=label)
            axes.set(yticks=[], xscale="log")
            axes.set_xticks(ticks, [f"{tick:.2g}" for tick in ticks])
            axes.minorticks_off()
        line[0].set_ylabel(_short(name), fontsize=6.0)
    figure.supxlabel("gradient norm", fontsize=7.5)
    for axes, epoch in zip(grid[0], epochs, strict=True):
        head(axes, f"epoch {round(20 * epoch) / 20:g}", scale)
    words = f"Gradient norms (logarithmic) of {norms['example'].nunique():,} training examples"
    finish(figure, scale, f"{words}; the outermost bins include all values beyond them.")
    return figure


def chosen_layers(norms: pd.DataFrame) -> list[str]:
    """The paper's four layers: embedding, value matrices of the middle and the last block, classifier.

    All layers, if there are at most four or none has "value" in its name.
    """
    layers = norms.sort_values("layer")["name"].unique().tolist()
    values = [layer for layer in layers if "value" in layer]
    if len(layers) <= 4 or not values:
        return layers
    chosen = [layers[0], values[(len(values) - 1) // 2], values[-1], layers[-1]]
    return list(dict.fromkeys(chosen))


def _short(name: str) -> str:
    """A layer's name in at most two lines: the modules that contain it, and its last part."""
    parts = [part for part in name.split(".") if part not in ("roberta", "encoder", "attention", "self", "model")]
    return parts[-1] if len(parts) < 2 else f"{'.'.join(parts[:-1])}\n{parts[-1]}"
