"""Draws how per-example gradient norms of layers move during training: gradnorm_cifar and gradnorm_sst2."""

from typing import Any

import numpy as np
import pandas as pd

from groupwise.analysis.figure_style import blank, note, plain_style, shade

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
