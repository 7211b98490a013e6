"""Rows and means for the figures, and their common style: a colour per mode, and a mark for reduced rows."""

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from groupwise.analysis.results import LEARNT, SCALES, Floors, Folders, Measured, read_all, refuse, settings_of
from groupwise.analysis.statistics import Summary, summarise
from groupwise.atomic import write_atomically, write_text
from groupwise.errors import UserError
from groupwise.sweeps.cells import PAPER, read_sweep

GREY = "#666666"
GRID = "#d9d9d9"
WEAK = "#999999"
"""The colour of results no better than the constant-prediction baseline."""
COLUMN, PAGE = 3.4, 5.5
"""The width in inches of a figure in a column, and of one across the page; both are printed at that size."""


class Series(NamedTuple):
    """The style of one line of a figure; the colours are safe for colour-blind readers (Okabe and Ito)."""

    label: str
    colour: str
    marker: str
    line: str = "-"


CLIP = {
    "none": Series("non-private", "#444444", "o"),
    "flat": Series("flat", "#e69f00", "D"),
    "ghost": Series("flat, ghost", "#009e73", "^"),
    "fixed_layer": Series("fixed per layer", "#cc79a7", "v"),
    "adaptive_layer": Series("adaptive per layer", "#0072b2", "s"),
    "adaptive_flat": Series("adaptive flat", "#d55e00", "P"),
    "per_device": Series("per device", "#56b4e9", "X"),
}
TIMED = CLIP | {"flat": CLIP["flat"]._replace(label="flat, book-keeping")}
"""For figures that show time: flat clipping has two implementations."""
ADAPTIVE = CLIP["adaptive_layer"].colour
BUDGETS = (Series("ε = 3", ADAPTIVE, "o", "--"), Series("ε = 8", ADAPTIVE, "s"))
"""For figures of adaptive per-layer clipping only: the mode's colour; budgets differ in marker and line."""
TASKS = {"cifar": "CIFAR-10", "sst2": "SST-2", "e2e": "E2E"}


class References(NamedTuple):
    """What a figure shows besides the measured rows."""

    floors: Floors
    """The constant-prediction baselines."""
    paper: pd.DataFrame | None = None
    """The paper's numbers for cells of the figure: ``cell``, ``value``, ``std``; never connected with ours."""
    missing: pd.DataFrame = pd.DataFrame({"cell": []})
    """The cells of the figure that have no rows: ``cell``."""


def finish(figure: Any, scale: str, text: str) -> None:
    """Draw the legend of all panels above them, and store the caption as the figure's label, which is not drawn."""
    found: dict[str, Any] = {}
    for axes in figure.axes:
        handles, labels = axes.get_legend_handles_labels()
        found |= dict(zip(labels, handles, strict=True))
    if found:
        figure.legend(found.values(), found.keys(), loc="outside upper center", ncols=4)
    which = f": scale={scale} ({SCALES[scale]})" if scale in SCALES else ""
    reduced = "" if scale == PAPER else f"Reduced, no reproduction{which}. "
    figure.set_label(reduced + text)


def head(axes: Any, title: str, scale: str) -> None:
    """Give a panel its title, and mark it if its rows are reduced."""
    axes.set_title(title, loc="left")
    if scale != PAPER:
        axes.set_title("reduced", loc="right", fontsize=6.5, style="italic", color=GREY)


def draw_floor(axes: Any, floor: float | None) -> None:
    """Draw the constant-prediction baseline as a dotted line, unless it is far below the data."""
    low, high = axes.get_ylim()
    span = high - low
    if floor is None or floor < low - span / 2:
        return
    axes.axhline(floor, color=GREY, linewidth=0.8, linestyle=":")
    axes.set_ylim(min(low, floor - 0.12 * span), max(high, floor + 0.12 * span))
    shift, va = (2, "bottom") if floor >= low + span / 2 else (-2, "top")
    look: dict[str, Any] = {"ha": "right", "va": va, "fontsize": 6.0, "color": GREY}
    look |= {"xycoords": axes.get_yaxis_transform(), "textcoords": "offset points"}
    axes.annotate(f"constant prediction: {floor:.1f}", (0.99, floor), (0, shift), **look)


def rule(axes: Any) -> None:
    """Faint lines behind a panel, at the ticks of its y axis."""
    axes.grid(axis="y", color=GRID, linewidth=0.6)
    axes.set_axisbelow(True)


def whisker(axes: Any, x: Any, table: Any, series: Series, *, joined: bool = True, floor: float | None = None) -> None:
    """Means with their intervals, as markers with bars; joined by a line, or not.

    Means less than `LEARNT` points above `floor` are inconclusive, and drawn as grey crosses.
    """
    x, mean = np.asarray(x, dtype=float), table["mean"].to_numpy(dtype=float)
    half = table["high"].to_numpy(dtype=float) - mean
    weak = np.zeros(len(mean), dtype=bool) if floor is None else mean < floor + LEARNT
    if joined:
        axes.plot(x, mean, color=series.colour, linestyle=series.line, linewidth=1.1, zorder=2)
    bars: dict[str, Any] = {"markersize": 4, "linestyle": "", "elinewidth": 0.9, "capsize": 2, "zorder": 3}
    for which, colour, marker in ((~weak, series.colour, series.marker), (weak, WEAK, "x")):
        if which.any():
            label = series.label if (which is weak) == weak.all() else None
            bars["yerr"] = half[which] if np.isfinite(half).any() else None
            axes.errorbar(x[which], mean[which], label=label, color=colour, marker=marker, **bars)


STYLE: dict[str, Any] = {
    "figure.constrained_layout.use": True,
    "font.family": "DejaVu Sans",  # comes with matplotlib
    "font.size": 7.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.6,
    "axes.titlesize": 8.0,
    "xtick.labelsize": 7.0,
    "ytick.labelsize": 7.0,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "legend.frameon": False,
    "legend.fontsize": 6.5,
    "pdf.fonttype": 42,
}
UNDATED: dict[str, dict[str, None]] = {"pdf": {"CreationDate": None}, "png": {"Software": None}}
"""File formats, and the metadata that is left out so that files are reproducible."""
PIXELS = 300
"""Dots per inch of a PNG."""


@contextmanager
def plain_style() -> Iterator[None]:
    """Use our settings of matplotlib, not those of the machine."""
    import matplotlib

    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(STYLE)  # type: ignore[arg-type]
        yield


def content(figure: Any, kind: str) -> bytes:
    """The figure as pdf or png; the same figure gives the same bytes."""
    written = io.BytesIO()
    with plain_style():
        figure.savefig(written, format=kind, metadata=UNDATED[kind], dpi=PIXELS)
    return written.getvalue()


def write_figure(figure: Any, title: str, folder: Path, name: str) -> list[Path]:
    """Write `<folder>/<name>.pdf` and `.png`, and title and caption as `<name>.txt`."""
    folder.mkdir(parents=True, exist_ok=True)
    written = {folder / f"{name}.{kind}": content(figure, kind) for kind in UNDATED}
    for path, drawn in written.items():
        write_atomically(path, lambda file, drawn=drawn: file.write(drawn))  # type: ignore[misc]
        path.chmod(0o644)
    write_text(folder / f"{name}.txt", f"{title}\n{figure.get_label()}\n")
    return list(written)


COMPANIONS = {"_curves": ("collect", ("step",)), "_norms": ("gradient_norms", ("epoch", "layer", "example"))}
"""Suffix of a file with several rows per run -> the module that makes it, and the columns that identify a row within
a run."""


def read_figure_rows(name: str, folders: Folders, metrics: Sequence[str] = ()) -> Measured:
    """The rows of the sweep `name` at the largest scale that has any, with `metrics` as finite numbers.

    Raises:
        UserError: there are none, or they are invalid (see `read_measured`).
    """
    sweep = read_sweep(folders.sweeps / f"{name}.yaml")
    cells = {cell.name for scale in (PAPER, *sweep.scales) for cell in sweep.cells(scale)}
    found = read_all(sweep, folders.measured, {cell: list(metrics) for cell in sorted(cells)})
    if not found:
        raise UserError(
            f"There are no rows of {name} in {folders.measured}: make them with make sweep-{name} SCALE=mini."
        )
    return found[0]


def read_companion(name: str, measured: Measured, folder: Path, suffix: str, numbers: Sequence[str]) -> pd.DataFrame:
    """The rows of `<name>_<scale><suffix>.csv`, several for each run of `measured`; see `COMPANIONS`.

    Raises:
        UserError: there is no such file, one of the `numbers` is not finite, a row is of a run that was not measured,
            or two rows have the same key.
    """
    path, (maker, place) = folder / f"{name}_{measured.scale}{suffix}.csv", COMPANIONS[suffix]
    if not path.is_file():
        command = f"python -m groupwise.sweeps.{maker} {name} scale={measured.scale}"
        raise UserError(f"There are no rows in {path}: make them with {command}.")
    frame = pd.read_csv(path, dtype={"cell": str, "hash": str})
    refuse(path, frame, ~frame["hash"].isin(measured.rows["hash"]), "is of a run that was not measured")
    for column in numbers:
        frame[column] = pd.to_numeric(frame.get(column, np.nan), errors="coerce")
        refuse(path, frame, ~np.isfinite(frame[column]), f"has no finite {column}")
    refuse(path, frame, frame.duplicated(["hash", *place]), "is there twice")
    return frame.assign(scale=measured.scale)


def with_settings(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows with the settings of their cells, with the paper's values, as columns, which replace their own."""
    settings = pd.DataFrame([settings_of(cell) for cell in rows["cell"]], index=rows.index)
    return settings.combine_first(rows)


def summary(rows: pd.DataFrame, keys: Sequence[str], metric: str) -> pd.DataFrame:
    """One row for each combination of `keys`, over seeds: `keys`, ``mean``, ``low``, ``high``, ``n``.

    ``low`` and ``high`` are the ends of the 95 % t-interval of the mean, NaN for a single seed.
    """
    groups = rows.groupby(list(keys), sort=False, dropna=False)[metric]
    lines = [dict(zip(keys, place, strict=True)) | summarise(list(values))._asdict() for place, values in groups]
    return pd.DataFrame(lines, columns=[*keys, *Summary._fields])


def seeds_in_words(counts: pd.Series) -> str:
    """``Mean and 95 % t-interval over 3 seeds``, for the caption of a figure."""
    least, most = counts.min(), counts.max()
    if most == 1:
        return "One seed, so no interval"
    return f"Mean and 95 % t-interval over {most if least == most else f'{least} to {most}'} seeds"
