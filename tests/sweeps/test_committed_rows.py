"""Every committed row is of the run that its cell composes to today: no change of configuration made it another one."""

import csv
from dataclasses import replace
from pathlib import Path

import pytest

from groupwise.config.identity import config_hash
from groupwise.privacy import make_plan
from groupwise.sweeps.cells import read_sweep
from tests.combinations import each_value_once, run

ROOT = Path(__file__).parents[2]
SWEEPS = {file.stem: read_sweep(file) for file in (ROOT / "sweeps").glob("*.yaml") if "grids:" in file.read_text()}
PLANNED = (
    *("dataset_size", "expected_batch_size", "steps", "delta", "epsilon"),
    *("num_groups", "quantile_budget", "sampling", "accountant"),
)
ROUNDING = 1e-3
"""Of a noise multiplier: by less than that do searches for it differ from version to version."""
FILES = sorted(file for file in (ROOT / "results" / "measured").glob("*.csv") if file.stem.rpartition("_")[0] in SWEEPS)


def test_there_are_rows_to_look_at() -> None:
    assert len(FILES) >= 16


@pytest.mark.parametrize(
    ("file", "all_of_them"),
    [(file, False) for file in FILES] + [pytest.param(file, True, marks=pytest.mark.slow) for file in FILES],
    ids=lambda value: value.stem if isinstance(value, Path) else "all" if value else "each value once",
)
def test_committed_rows_are_of_todays_configurations(file: Path, all_of_them: bool) -> None:
    name, _, scale = file.stem.rpartition("_")
    cells = {(cell.name, cell.seed): cell for cell in SWEEPS[name].cells(scale)}
    with file.open(newline="") as lines:
        rows = list(csv.DictReader(lines))
    assert rows
    by_overrides = {cells[row["cell"], int(row["seed"])].overrides: row for row in rows}
    for overrides in by_overrides if all_of_them else each_value_once(by_overrides):
        row = by_overrides[overrides]
        config = run(*(each for each in overrides if not each.startswith("seed=")))  # composed for all seeds at once
        assert config_hash(replace(config, seed=int(row["seed"]))) == row["hash"], row["cell"]


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
        for each in found:
            assert float(each) == pytest.approx(plan.noise_multiplier, rel=ROUNDING), numbers
