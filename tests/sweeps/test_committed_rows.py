"""Every committed row is of the run that its cell composes to today: no change of configuration made it another one."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path

import pytest

from groupwise.config.identity import config_hash
from groupwise.sweeps.cells import read_sweep
from tests.combinations import run

ROOT = Path(__file__).parents[2]
SWEEPS = {file.stem: read_sweep(file) for file in (ROOT / "sweeps").glob("*.yaml") if "grids:" in file.read_text()}
FILES = sorted(file for file in (ROOT / "results" / "measured").glob("*.csv") if file.stem.rpartition("_")[0] in SWEEPS)


def test_there_are_rows_to_look_at() -> None:
    assert len(FILES) >= 16


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_committed_rows_are_of_todays_configurations(file: Path) -> None:
    name, _, scale = file.stem.rpartition("_")
    cells = {(cell.name, cell.seed): cell for cell in SWEEPS[name].cells(scale)}
    with file.open(newline="") as lines:
        rows = list(csv.DictReader(lines))
    assert rows
    for row in rows:
        cell = cells[row["cell"], int(row["seed"])]
        config = run(
            *(each for each in cell.overrides if not each.startswith("seed="))
        )  # composed for all seeds at once
        assert config_hash(replace(config, seed=cell.seed)) == row["hash"], cell.name
