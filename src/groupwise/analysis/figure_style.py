"""Draws all figures alike: a colour for each way of clipping, reduced rows marked, files without dates."""

import io
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from groupwise.atomic import write_atomically

PAPER = "paper"
WORDS = {
    "midi": ": scale=midi (real data, a narrow network)",
    "mini": ": scale=mini (real data, small models)",
    "demo": ": scale=demo (embedded data, small models)",
    "smoke": ": scale=smoke (a few steps)",
}
GREY = "#666666"
GRID = "#d9d9d9"
LETTERS = 16
"""Of a note, an inch."""
REDUCED_FACE = "#f3f3f3"
REDUCED_HATCH = "#e2e2e2"


class Series(NamedTuple):
    """How one line of a figure looks; the colours are told apart by the colour-blind (Okabe and Ito)."""

    label: str
    colour: str
    marker: str


CLIP = {
    "none": Series("non-private", "#444444", "o"),
    "flat": Series("flat", "#e69f00", "D"),
    "ghost": Series("ghost", "#009e73", "^"),
    "fixed_layer": Series("fixed per layer", "#cc79a7", "v"),
    "adaptive_layer": Series("adaptive per layer", "#0072b2", "s"),
    "adaptive_flat": Series("adaptive flat", "#d55e00", "P"),
    "per_device": Series("per device", "#56b4e9", "X"),
}
BUDGET = {"3": Series("ε = 3", "#56b4e9", "o"), "8": Series("ε = 8", "#0072b2", "s")}
TASKS = {"cifar": "CIFAR-10", "sst2": "SST-2", "e2e": "E2E"}


def note(figure: Any, scale: str, text: str) -> None:
    """Say under the figure what it shows, and first of all whether it is reduced."""
    if scale != PAPER:
        text = f"Reduced, no reproduction{WORDS.get(scale, '')}. {text}"
    width = int(LETTERS * figure.get_size_inches()[0])
    figure.supxlabel(textwrap.fill(text, width), fontsize=7.5, color=GREY)


def shade(axes: Any, scale: str) -> None:
    """Grey and hatch a panel whose rows are reduced."""
    if scale != PAPER:
        axes.patch.set(facecolor=REDUCED_FACE, hatch="////", edgecolor=REDUCED_HATCH, linewidth=0)


def rule(axes: Any) -> None:
    """Faint lines behind a panel, at the ticks of its y axis."""
    axes.grid(axis="y", color=GRID, linewidth=0.6)
    axes.set_axisbelow(True)


def whisker(axes: Any, x: Any, table: Any, series: Series, *, label: str | None = None, line: str = "-") -> None:
    """Means with their intervals, as markers with bars, joined by a line where `line` is one."""
    half = (table["high"] - table["mean"]).to_numpy()
    axes.errorbar(
        x,
        table["mean"],
        yerr=half,
        label=series.label if label is None else label,
        color=series.colour,
        marker=series.marker,
        markersize=5,
        linestyle=line,
        linewidth=1.4,
        elinewidth=1.0,
        capsize=3,
    )


STYLE: dict[str, Any] = {
    "figure.constrained_layout.use": True,
    "font.family": "DejaVu Sans",  # comes with matplotlib
    "font.size": 9.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 9.0,
    "hatch.linewidth": 0.5,
    "legend.frameon": False,
    "legend.fontsize": 8.0,
    "pdf.fonttype": 42,
    "svg.fonttype": "none",
    "svg.hashsalt": "groupwise",
}
UNDATED: dict[str, dict[str, None]] = {"pdf": {"CreationDate": None}, "png": {"Software": None}, "svg": {"Date": None}}
KINDS = ("pdf", "png")
"""What a figure is written as; a page may also take it as svg."""
PIXELS = 200
"""Of a PNG, an inch."""


@contextmanager
def plain_style() -> Iterator[None]:
    """Draw and write with our settings, not those of the machine. Needs no screen."""
    import matplotlib

    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(STYLE)  # type: ignore[arg-type]
        yield


def blank(width: float, height: float) -> Any:
    """An empty figure, of so many inches; to be called, and filled, within `plain_style`."""
    from matplotlib.figure import Figure  # no pyplot: no window, no global state

    return Figure(figsize=(width, height))


def content(figure: Any, kind: str) -> bytes:
    """The figure as pdf, png or svg. The same figure gives the same bytes."""
    written = io.BytesIO()
    with plain_style():
        figure.savefig(written, format=kind, metadata=UNDATED[kind], dpi=PIXELS)
    return written.getvalue()


def write_figure(figure: Any, folder: Path, name: str) -> list[Path]:
    """Write `<folder>/<name>.pdf` and `.png`."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for kind in KINDS:
        path, drawn = folder / f"{name}.{kind}", content(figure, kind)
        write_atomically(path, lambda file, drawn=drawn: file.write(drawn))  # type: ignore[misc]
        path.chmod(0o644)
        written.append(path)
    return written
