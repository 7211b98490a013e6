"""Figures as files that depend on nothing but their content: no dates, no random names, no fonts of the machine."""

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

from groupwise.atomic import write_atomically

STYLE: dict[str, Any] = {
    "figure.constrained_layout.use": True,
    "font.family": "DejaVu Sans",  # comes with matplotlib
    "font.size": 9.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "pdf.fonttype": 42,
    "svg.hashsalt": "groupwise",
}
UNDATED: dict[str, dict[str, None]] = {"pdf": {"CreationDate": None}, "svg": {"Date": None}}


def draw_files(folder: Path, name: str, panels: int, draw: Callable[[Any], object]) -> list[Path]:
    """Let `draw` fill the axes of a figure of `panels` panels, and write it to `<folder>/<name>.pdf` and `.svg`.

    Needs no screen. Drawing the same thing again writes the same bytes.
    """
    import matplotlib
    from matplotlib.figure import Figure  # no pyplot: no window, no global state

    folder.mkdir(parents=True, exist_ok=True)
    written = []
    with matplotlib.rc_context():
        matplotlib.rcdefaults()  # not what the machine's own settings say
        matplotlib.rcParams.update(STYLE)  # type: ignore[arg-type]
        figure = Figure(figsize=(4.5 * panels, 3.4))
        draw(figure.subplots(1, panels))
        for kind, undated in UNDATED.items():
            content = io.BytesIO()
            figure.savefig(content, format=kind, metadata=undated)
            path = folder / f"{name}.{kind}"
            write_atomically(path, lambda file, content=content: file.write(content.getvalue()))  # type: ignore[misc]
            path.chmod(0o644)
            written.append(path)
    return written
