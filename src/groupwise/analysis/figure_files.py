"""Figures as files that depend on nothing but their content: no dates, no random names, no fonts of the machine."""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from groupwise.atomic import write_atomically

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
