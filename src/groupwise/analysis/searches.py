"""Lists the results of searches, and of sweeps that are not in a table of the paper."""

import math
from pathlib import Path

from groupwise.analysis.claims import OURS, SEARCH
from groupwise.analysis.results import SHOWN, Folders, Page, cost_of, number
from groupwise.rows import markdown, read_table, table_path
from groupwise.sweeps.best import HEADLINES, candidates


def searches(sweeps: Path, measured: Path) -> dict[tuple[str, str], Path]:
    """The files of rows of searches, and of sweeps with models that are not the paper's, by sweep and scale."""
    names = sorted(path.stem for path in sweeps.glob("*.yaml") if path.stem.startswith(SEARCH) or path.stem in OURS)
    found = {(name, scale): table_path(measured, name, scale) for name in names for scale in SHOWN}
    return {at: path for at, path in found.items() if path.is_file()}


def page(folders: Folders) -> Page:
    """The page of every cell of every search, with its mean over seeds; the best cell of each group is marked.

    Raises `UserError` for rows that cannot be read, or have no headline metric.
    """
    parts = [
        "# Searches, and comparisons that are not the paper's",
        "Made by `python -m groupwise.analysis.tables searches`. Cells with the same task, model, trainable part, "
        "mode and budget form a group. A search with `data.holdout` does not use the test set. Its privacy cost is not "
        "counted ([errata](../../docs/errata.md)). Other cells are evaluated on the test set.",
    ]
    found = searches(folders.sweeps, folders.measured)
    for (name, scale), path in found.items():
        rows = read_table(path)
        metric = next((metric for metric in HEADLINES if any(row.get(metric) for row in rows)), HEADLINES[0])
        lines = []
        for cell in candidates(rows, metric).itertuples():
            best = "best" * (name.startswith(SEARCH) and cell.best)
            spread = "" if math.isnan(cell.std) else f" ± {cell.std:.2f}"
            lines.append([f"`{cell.cell}`", number(cell.mean) + spread, str(cell.seeds), best])
        cost = f"{len(rows)} runs{cost_of(rows)}."
        parts += [f"## {name}, scale={scale}", cost, markdown(["cell", metric, "seeds", "in its group"], lines)]
    return Page("\n\n".join(parts) + "\n", f"{len(found)} searches")
