"""What a run reaches by when: the figures runtime_nll and runtime_metrics."""

from typing import Any

import pandas as pd

from groupwise.analysis.figure_files import blank, plain_style
from groupwise.analysis.figure_rows import seeds_in_words, summary
from groupwise.analysis.figure_style import CLIP, TASKS, note, rule, shade

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
