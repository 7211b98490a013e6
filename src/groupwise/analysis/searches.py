"""Writes the results of searches and of sweeps that belong to no table of the paper:

python -m groupwise.analysis.searches
"""

import argparse
import math
import sys
from pathlib import Path

from groupwise.analysis.claims import OURS, SEARCH
from groupwise.analysis.results import SHOWN, cost_of, settings_of
from groupwise.analysis.tables import number
from groupwise.atomic import write_text
from groupwise.errors import command
from groupwise.rows import markdown, read_table, table_path
from groupwise.sweeps.best import HEADLINES, candidates

PUBLISHED = {("scatter_cnn", "flat"): "69.3 (Tramèr and Boneh, 2021)"}
"""Results of others for the cells of a sweep with that mode."""


def searches(sweeps: Path, measured: Path) -> dict[tuple[str, str], Path]:
    """The files of rows of the sweeps that choose settings or compare what the paper does not, by sweep and scale."""
    names = sorted(path.stem for path in sweeps.glob("*.yaml") if path.stem.startswith(SEARCH) or path.stem in OURS)
    found = {(name, scale): table_path(measured, name, scale) for name in names for scale in SHOWN}
    return {at: path for at, path in found.items() if path.is_file()}


def page(sweeps: Path, measured: Path) -> str:
    """Every cell of every search with its mean over seeds, in Markdown; the best among rivals says so.

    Raises:
        UserError: rows that do not parse, or have no headline metric.
    """
    parts = [
        "# Searches, and comparisons that are not the paper's",
        "Made by `python -m groupwise.analysis.searches`. Rivals share task, model, mode and budget. A search on a "
        "holdout of the training set (`data.holdout`) does not see the test set. Its privacy cost is not counted "
        "([errata](../../docs/errata.md)). Other cells are of the test set.",
    ]
    for (name, scale), path in searches(sweeps, measured).items():
        rows = read_table(path).rows
        metric = next((metric for metric in HEADLINES if any(row.get(metric) for row in rows)), HEADLINES[0])
        lines = []
        for cell in candidates(rows, metric).itertuples():
            best = "best" * (name.startswith(SEARCH) and cell.best)
            beside = PUBLISHED.get((name, settings_of(cell.cell).get("clip", "")), best)
            spread = "" if math.isnan(cell.std) else f" ± {cell.std:.2f}"
            lines.append([f"`{cell.cell}`", number(cell.mean) + spread, str(cell.seeds), beside])
        last = "published" if any(name == sweep for sweep, _ in PUBLISHED) else "among its rivals"
        cost = f"{len(rows)} runs{cost_of(rows)}."
        parts += [f"## {name}, scale={scale}", cost, markdown(["cell", metric, "seeds", last], lines)]
    return "\n\n".join(parts) + "\n"


@command
def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m groupwise.analysis.searches")
    parser.add_argument("--sweeps", type=Path, default=Path("sweeps"))
    parser.add_argument("--measured", type=Path, default=Path("results/measured"))
    parser.add_argument("--out", type=Path, default=Path("results/tables"))
    given = parser.parse_args(arguments)
    text = page(given.sweeps, given.measured)
    given.out.mkdir(parents=True, exist_ok=True)
    write_text(given.out / "searches.md", text)
    print(f"{given.out / 'searches.md'}: {len(searches(given.sweeps, given.measured))} searches")
    return 0


if __name__ == "__main__":
    sys.exit(main())
