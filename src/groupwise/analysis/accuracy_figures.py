"""Draws accuracy against a setting and against time: adaptive_vs_fixed, target_quantile, quantile_budget, runtime_*."""

from typing import Any

import pandas as pd

from groupwise.analysis.figure_rows import seeds_in_words, summary
from groupwise.analysis.figure_style import BUDGET, CLIP, TASKS, blank, note, plain_style, rule, shade, whisker

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
