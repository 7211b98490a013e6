"""Plots a run, finished or not: loss, accuracy, ε and thresholds over its steps, from its metrics.jsonl.

python -m groupwise.analysis.run_plot results/runs/0123456789ab
"""

import argparse
import sys
from io import StringIO
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib import colormaps
from matplotlib.figure import Figure

from groupwise.analysis.figure_style import PAGE, plain_style, write_figure
from groupwise.errors import UserError, command

WORDS = {"nonprivate/loss": "training batches", "valid/loss": "validation"}
LABELLED = 6
"""How many thresholds the legend names: the first, the last, and some between."""


def read_metrics(folder: Path) -> pd.DataFrame:
    """The run's metrics, one row per step, NaN if not computed; raises `UserError` if there are no metrics yet."""
    try:
        text = (folder / "metrics.jsonl").read_text(encoding="utf-8")
        metrics = pd.read_json(StringIO(text[: text.rfind("\n") + 1]), lines=True)  # the last line may be incomplete
    except (OSError, ValueError) as error:
        raise UserError(f"{folder} has no readable metrics.jsonl: give the folder of a run, results/runs/…") from error
    if metrics.empty:
        raise UserError(f"{folder} has no metrics yet: wait for its first step.")
    return metrics.groupby("step").first()


def draw_run(metrics: pd.DataFrame, title: str) -> Figure:
    """A figure with up to five panels over the steps, for the metrics of `read_metrics`."""
    thresholds = [name for name in metrics if name.startswith("threshold/")]
    held_out = [name for name in metrics if name.startswith("valid/") and "loss" not in name]
    kinds = {
        "loss": [name for name in WORDS if name in metrics],
        "accuracy (%)": [name for name in held_out if name.startswith("valid/accuracy")],
        "validation": [name for name in held_out if not name.startswith("valid/accuracy")],
        "ε, upper bound": ["epsilon_bound"] if "epsilon_bound" in metrics else [],
        "threshold $C_k$": thresholds,
    }
    panels = {label: names for label, names in kinds.items() if names}
    figure = Figure(figsize=(PAGE, 1.5 * len(panels) + 0.4), layout="constrained")
    axes: list[Any] = list(figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0])
    for place, (label, names) in zip(axes, panels.items(), strict=True):
        named = {names[round(i * (len(names) - 1) / (LABELLED - 1))] for i in range(LABELLED)}
        for number, name in enumerate(names):
            series = metrics[name].dropna()
            colour = colormaps["viridis"](number / max(len(names) - 1, 1) * 0.9)
            shown = WORDS.get(name, name.partition("/")[2]) if name in named else None
            marker = "" if len(series) > 1 else "o"
            place.plot(series.index, series, marker=marker, color=colour, linewidth=0.9, label=shown)
        place.set_ylabel(label)
        if len(names) > 1:
            place.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), fontsize=5.5)
    if thresholds:
        axes[-1].set_yscale("log")
    axes[-1].set_xlabel("step")
    axes[0].set_title(title, loc="left")
    figure.set_label("The loss of training batches is not private; thresholds and ε may be published.")
    return figure


@command
def main(arguments: list[str] | None = None) -> int:
    """Write plot.pdf and plot.png into the run's folder; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m groupwise.analysis.run_plot", description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path, help="the folder of one run, such as results/runs/0123456789ab")
    folder = parser.parse_args(arguments).folder
    metrics = read_metrics(folder)
    with plain_style():
        figure = draw_run(metrics, folder.resolve().name)
    for path in write_figure(figure, folder.resolve().name, folder, "plot"):
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
