"""The committed rows of the figures at scale=mini, with sweeps that have exactly their cells."""

import shutil
from pathlib import Path

import pandas as pd
import pytest
import yaml

from groupwise.analysis.figures import KINDS
from groupwise.analysis.results import Folders

RESULTS = Path(__file__).resolve().parents[3] / "results"


def write_sweeps(folder: Path, measured: Path) -> None:
    """Write, for each file of rows, a sweep with exactly its cells."""
    for path in sorted(measured.glob("*_mini.csv")):
        cells = pd.read_csv(path)[["cell", "seed"]]
        grids: list[dict[str, object]] = []
        for cell, rows in cells.groupby("cell", sort=False):
            grid: dict[str, object] = dict(item.split("=", 1) for item in str(cell).split())
            grids.append(grid | {"seed": sorted(int(seed) for seed in rows["seed"])})
        name = path.stem.removesuffix("_mini")
        (folder / f"{name}.yaml").write_text("# Generated\n" + yaml.safe_dump({"grids": grids, "scales": {"mini": {}}}))


@pytest.fixture(scope="session")
def unchanged(tmp_path_factory) -> Folders:
    """Folders that tests must not change, with the numbers of the paper."""
    folders = Folders(RESULTS / "paper", *(tmp_path_factory.mktemp(name) for name in ("measured", "sweeps")))
    for name in KINDS:
        for path in (RESULTS / "measured").glob(f"{name}_mini*.csv"):
            shutil.copy(path, folders.measured)
    write_sweeps(folders.sweeps, folders.measured)
    return folders


@pytest.fixture
def folders(tmp_path: Path, unchanged: Folders) -> Folders:
    """A copy of the folders for one test."""
    for name in ("measured", "sweeps"):
        shutil.copytree(getattr(unchanged, name), tmp_path / "results" / name)
    return Folders(RESULTS / "paper", tmp_path / "results" / "measured", tmp_path / "results" / "sweeps")
