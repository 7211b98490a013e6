"""Every committed row has the hash of the configuration that its cell composes to today."""

import csv
from dataclasses import replace
from pathlib import Path

import pytest

from groupwise.config.identity import config_hash
from groupwise.sweeps.cells import read_sweep
from tests.combinations import each_value_once, run
from trust.goldens import committed_rows, hashes, noise

ROOT = Path(__file__).parents[2]
SWEEPS = {file.stem: read_sweep(file) for file in (ROOT / "sweeps").glob("*.yaml") if "grids:" in file.read_text()}
FILES = sorted(file for file in (ROOT / "results" / "measured").glob("*.csv") if file.stem.rpartition("_")[0] in SWEEPS)


def test_committed_files_are_found() -> None:
    assert len(FILES) >= 16


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_committed_rows_have_current_hashes(file: Path) -> None:
    name, _, scale = file.stem.rpartition("_")
    cells = {(cell.name, cell.seed): cell for cell in SWEEPS[name].cells(scale)}
    with file.open(newline="") as lines:
        rows = list(csv.DictReader(lines))
    assert rows
    by_overrides = {cells[row["cell"], int(row["seed"])].overrides: row for row in rows}
    for overrides in each_value_once(by_overrides):
        row = by_overrides[overrides]
        config = run(*(each for each in overrides if not each.startswith("seed=")))  # composed once for all seeds
        assert config_hash(replace(config, seed=int(row["seed"]))) == row["hash"], row["cell"]


@pytest.mark.slow
def test_all_committed_rows_have_current_hashes_and_noise_multipliers() -> None:
    configurations, plans = hashes(), noise()
    assert len(configurations) == len(committed_rows()) and len(plans) >= 15
    assert not [name for name, value in (configurations | plans).items() if "where " in str(value)]
