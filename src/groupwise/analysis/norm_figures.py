"""Draws how per-example gradient norms of layers move during training, as a heatmap and as histograms."""

from typing import Any, Literal

import numpy as np
import pandas as pd

from groupwise.analysis.figure_style import NOTHING, PAGE, Beside, blank, mark_all, note, plain_style

QUANTILES = (0.25, 0.50, 0.75, 0.85)
QUANTILE_LINES: tuple[Literal[":", "-.", "--", "-"], ...] = (":", "-.", "--", "-")
"""Told apart by the line, as colours are those of ways to clip."""
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
                np.maximum(table.to_numpy(), least),
                norm=colours,
                cmap="Blues",
                aspect="auto",
                interpolation="none",
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
