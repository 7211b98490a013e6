"""Draws accuracy against a setting and against time, and how per-example gradient norms move during training."""

from typing import Any

import numpy as np
import pandas as pd

from groupwise.analysis.figure_style import (
    BUDGET,
    CLIP,
    TASKS,
    blank,
    note,
    plain_style,
    rule,
    seeds_in_words,
    shade,
    summary,
    whisker,
)

ACCURACY = "valid/accuracy"
SPREAD = 0.22
"""Of the methods at one budget, in units of the distance between budgets."""
DODGE = 0.006
"""How far the two budgets stand to either side of a value of q, so that their intervals do not cover each other."""


def draw_adaptive_vs_fixed(rows: pd.DataFrame) -> Any:
    """Three ways of clipping at two budgets and without noise: flat, fixed per layer, adaptive per layer."""
    table = summary(rows.assign(budget=_budgets(rows)), ["clip", "budget"], ACCURACY)
    budgets = [name for name in ("ε = 3", "ε = 8", "no noise") if name in set(table["budget"])]
    scale = rows["scale"].iloc[0]
    with plain_style():
        figure = blank(5.2, 3.6)
        axes = figure.subplots()
        shade(axes, scale)
        methods = [name for name in CLIP if name in set(table["clip"])]
        for place, name in enumerate(methods):
            own = table[table["clip"] == name].set_index("budget").reindex(budgets)
            shift = SPREAD * (place - (len(methods) - 1) / 2)
            x = [number + shift for number in range(len(budgets))]
            whisker(axes, x, own, CLIP[name], line="")
            for at, mean in zip(x, own["mean"], strict=True):
                axes.annotate(f"{mean:.1f}", (at, mean), (5, 0), textcoords="offset points", fontsize=7, va="center")
        axes.set_xticks(range(len(budgets)), budgets)
        axes.set_xlim(-0.5, len(budgets) - 0.4)
        axes.set(ylabel="validation accuracy (%)", title="CIFAR-10")
        rule(axes)
        axes.legend(loc="best")
        note(figure, scale, f"{seeds_in_words(table['n'])}.")
    return figure


def _budgets(rows: pd.DataFrame) -> pd.Series:
    quiet = rows["privacy"] == "noiseless" if "privacy" in rows else pd.Series(False, index=rows.index)
    return ("ε = " + rows["privacy.epsilon"].astype(str).str.removesuffix(".0")).mask(quiet, "no noise")


def draw_target_quantile(rows: pd.DataFrame) -> Any:
    """Accuracy against the quantile of norms that thresholds follow, a panel a task."""
    table = _against(rows, "clip.target_quantile")
    scale = rows["scale"].iloc[0]
    with plain_style():
        figure = blank(8.4, 3.5)
        for axes, task in zip(figure.subplots(1, 2), ("cifar", "sst2"), strict=True):
            here = table[table["task"] == task]
            _panel(axes, task, scale, here)
            for step, (budget, series) in zip((-DODGE, DODGE), BUDGET.items(), strict=True):
                own = here[here["budget"] == budget]
                if len(own):
                    whisker(axes, own["x"] + step, own, series)
            if len(here):
                axes.set(xlabel="target quantile q", xlim=(0, 1))
                axes.legend()
        note(figure, scale, f"{seeds_in_words(table['n'])}.")
    return figure


def draw_quantile_budget(rows: pd.DataFrame) -> Any:
    """Accuracy against the share of the budget that the counts take: SST-2."""
    table = _against(rows, "clip.quantile_budget")
    table, scale = table[table["task"] == "sst2"], rows["scale"].iloc[0]
    shares = sorted(table["x"].unique())
    with plain_style():
        figure = blank(5.2, 3.6)
        axes = figure.subplots()
        _panel(axes, "sst2", scale, table)
        for step, (budget, series) in zip((-4 * DODGE, 4 * DODGE), BUDGET.items(), strict=True):
            own = table[table["budget"] == budget]
            whisker(axes, [shares.index(x) + step for x in own["x"]], own, series)
        axes.set_xticks(range(len(shares)), [f"{100 * x:g} %" for x in shares])
        axes.set(xlabel="share r of the budget for quantiles")
        axes.legend()
        note(figure, scale, f"{seeds_in_words(table['n'])}.")
    return figure


def _against(rows: pd.DataFrame, key: str) -> pd.DataFrame:
    """`summary` by task, budget and `key`, which becomes the column ``x``; sorted by it."""
    rows = rows.assign(x=pd.to_numeric(rows[key]), budget=rows["privacy.epsilon"].astype(str).str.removesuffix(".0"))
    return summary(rows, ["task", "budget", "x"], ACCURACY).sort_values("x", kind="stable")


def _panel(axes: Any, task: str, scale: str, table: pd.DataFrame) -> None:
    shade(axes, scale)
    axes.set(title=TASKS[task], ylabel="validation accuracy (%)")
    if table.empty:
        axes.text(0.5, 0.5, "not run", transform=axes.transAxes, ha="center", va="center")
        axes.set(xticks=[], yticks=[])
    rule(axes)


LABELS = {"test/nll": "test negative log-likelihood", "test/bleu": "test BLEU", "test/rougeL": "test ROUGE-L"}
UNITS = ((3600.0, "hours"), (60.0, "minutes"), (1.0, "seconds"))


def draw_runtime_nll(curves: pd.DataFrame) -> Any:
    """Test loss against wall time of training."""
    return _against_time(curves, ["test/nll"])


def draw_runtime_metrics(curves: pd.DataFrame) -> Any:
    """BLEU and ROUGE-L against wall time of training."""
    return _against_time(curves, ["test/bleu", "test/rougeL"])


def _against_time(curves: pd.DataFrame, metrics: list[str]) -> Any:
    scale = curves["scale"].iloc[0]
    size, unit = next(((size, unit) for size, unit in UNITS if curves["seconds"].max() >= 2 * size), UNITS[-1])
    times = curves.groupby(["clip", "step"])["seconds"].mean() / size
    counts: list[int] = []
    with plain_style():
        figure = blank(5.2 if len(metrics) == 1 else 4.2 * len(metrics), 3.4)
        for axes, metric in zip(figure.subplots(1, len(metrics), squeeze=False)[0], metrics, strict=True):
            table = summary(curves, ["clip", "step"], metric)
            counts += table["n"].tolist()
            shade(axes, scale)
            for name, series in CLIP.items():
                own = table[table["clip"] == name].sort_values("step")
                if own.empty:
                    continue
                x = [times[name, step] for step in own["step"]]
                axes.plot(x, own["mean"], color=series.colour, marker=series.marker, markersize=4, label=series.label)
                axes.fill_between(x, own["low"], own["high"], color=series.colour, alpha=0.18, linewidth=0)
            axes.set(xlabel=f"wall time of training ({unit})", ylabel=LABELS[metric], title=_task(curves))
            axes.set_xlim(left=0)
            rule(axes)
            axes.legend()
        note(figure, scale, f"{seeds_in_words(pd.Series(counts))}; time without evaluations.")
    return figure


def _task(curves: pd.DataFrame) -> str:
    name = str(curves["task"].iloc[0])
    return TASKS.get(name, name)


QUANTILES = (0.25, 0.50, 0.75, 0.85)
QUANTILE_COLOURS = ("#009e73", "#e69f00", "#cc79a7", "#d55e00")
BARS = "#8fbbd9"
BINS = 40


def draw_gradnorm_cifar(norms: pd.DataFrame) -> Any:
    """A heatmap for each epoch: a row an example, a column a layer from input to output, darker for a larger norm."""
    from matplotlib.colors import LogNorm

    scale, epochs = norms["scale"].iloc[0], sorted(norms["epoch"].unique())
    positive = norms["norm"][norms["norm"] > 0]
    least = float(positive.quantile(0.01))
    colours = LogNorm(least, float(positive.max()))
    with plain_style():
        figure = blank(min(2.0 * len(epochs) + 1.2, 11.0), 3.4)
        panels = figure.subplots(1, len(epochs), squeeze=False, sharey=True)[0]
        for axes, epoch in zip(panels, epochs, strict=True):
            table = norms[norms["epoch"] == epoch].pivot(index="example", columns="layer", values="norm")
            image = axes.imshow(
                np.maximum(table.to_numpy(), least),
                norm=colours,
                cmap="Blues",
                aspect="auto",
                interpolation="none",
            )
            axes.set(title=f"epoch {epoch:.3g}", xticks=[0, table.shape[1] - 1], yticks=[])
            axes.set_xticklabels(["1", str(table.shape[1])])
        panels[0].set_ylabel(f"{norms['example'].nunique()} training examples")
        figure.colorbar(image, ax=panels, label="gradient norm", shrink=0.9, pad=0.01)
        note(figure, scale, "Columns: layers from input (left) to output (right).")
    return figure


def draw_gradnorm_sst2(norms: pd.DataFrame) -> Any:
    """Histograms, a row a layer and a column an epoch, with dashed lines at four quantiles."""
    scale, epochs = norms["scale"].iloc[0], sorted(norms["epoch"].unique())
    layers = chosen_layers(norms)
    with plain_style():
        figure = blank(2.1 * len(epochs) + 0.8, 1.5 * len(layers) + 0.9)
        grid = figure.subplots(len(layers), len(epochs), squeeze=False, sharex="row")
        for line, (_, name) in zip(grid, layers, strict=True):
            own = norms[norms["name"] == name]
            edges = np.linspace(0, float(own["norm"].quantile(0.995)), BINS + 1)
            for axes, epoch in zip(line, epochs, strict=True):
                values = own["norm"][own["epoch"] == epoch].to_numpy()
                shade(axes, scale)
                axes.hist(np.minimum(values, edges[-1]), bins=edges, color=BARS)
                for share, colour in zip(QUANTILES, QUANTILE_COLOURS, strict=True):
                    axes.axvline(np.quantile(values, share), color=colour, linestyle="--", linewidth=1.1)
                axes.set(yticks=[])
            line[0].set_ylabel(_short(name), fontsize=8)
        for axes, epoch in zip(grid[0], epochs, strict=True):
            axes.set_title(f"epoch {epoch:.3g}")
        _legend(figure)
        examples = norms["example"].nunique()
        note(
            figure, scale, f"Gradient norms of {examples:,} training examples; the last bin holds all that are larger."
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

    lines = [Line2D([], [], color=colour, linestyle="--", linewidth=1.1) for colour in QUANTILE_COLOURS]
    labels = [f"{100 * share:g} %" for share in QUANTILES]
    figure.legend(lines, labels, title="quantiles", loc="outside right upper", title_fontsize=8)
