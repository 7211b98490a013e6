"""Every committed row is of the run that its cell composes to today: no change of configuration made it another one."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path

import pytest

from groupwise.config.identity import config_hash
from groupwise.privacy import make_plan
from groupwise.sweeps.cells import read_sweep
from tests.combinations import run

ROOT = Path(__file__).parents[2]
SWEEPS = {file.stem: read_sweep(file) for file in (ROOT / "sweeps").glob("*.yaml") if "grids:" in file.read_text()}
PLANNED = (
    *("dataset_size", "expected_batch_size", "steps", "delta", "epsilon"),
    *("num_groups", "quantile_budget", "sampling", "accountant"),
)
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


@pytest.mark.slow
def test_committed_noise_is_what_the_plan_finds_today() -> None:
    plans: dict[tuple[str, ...], set[str]] = {}
    for file in FILES:
        with file.open(newline="") as lines:
            for row in csv.DictReader(lines):
                if row.get("plan.epsilon", "inf") not in ("", "inf") and row["plan.noise_multiplier"] != "0.0":
                    plans.setdefault(tuple(row[f"plan.{name}"] for name in PLANNED), set()).add(
                        row["plan.noise_multiplier"]
                    )
    assert len(plans) >= 15
    for numbers, found in plans.items():
        size, batch, steps, delta, epsilon, groups, budget, sampling, accountant = numbers
        plan = make_plan(
            dataset_size=int(size),
            expected_batch_size=float(batch),
            steps=int(steps),
            delta=float(delta),
            epsilon=float(epsilon),
            num_groups=int(groups),
            quantile_budget=float(budget),
            sampling=sampling,
            accountant=accountant,
        )
        assert {float(each) for each in found} == {plan.noise_multiplier}, numbers
