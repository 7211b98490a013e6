"""A flattering change in a copy of the project's rows is refused, or it yields no agreement.

A number that was altered in a row is caught by neither: that takes `make reproduce`.
"""

import shutil
from pathlib import Path

import pandas as pd
import pytest

from groupwise.analysis.claims import CLAIMS
from groupwise.analysis.findings import AGREEMENT, verdicts
from groupwise.analysis.results import CONSTANT, Folders
from groupwise.errors import UserError

ROOT = Path(__file__).resolve().parents[3]
ROWS = "adaptivity_mini.csv"
ALONE = "noise_allocation"
"""A sweep that shares no cells with others, so that no other rows reveal a change."""


def edit(folders: Folders, change, name: str = ROWS) -> None:
    path = folders.measured / name
    change(pd.read_csv(path, dtype=str, keep_default_na=False)).to_csv(path, index=False)


def replace(folders: Folders, before: str, after: str) -> None:
    path = folders.sweeps / f"{ALONE}.yaml"
    text = path.read_text()
    assert before in text
    path.write_text(text.replace(before, after))


def drop_a_seed(folders):
    edit(folders, lambda rows: rows[(rows["seed"] != "2") | ~rows["cell"].str.contains("clip=adaptive_flat")])


def drop_a_seed_everywhere(folders):
    edit(folders, lambda rows: rows[rows["seed"] != "2"], f"{ALONE}_mini.csv")
    replace(folders, "[0, 1, 2]", "[0, 1]")


def one_seed(folders):
    edit(folders, lambda rows: rows[rows["seed"] == "0"])


def count_another_budget_as_seeds(folders):
    def change(rows):
        other, seeds = rows["cell"].str.contains("epsilon=3"), rows["seed"].astype(int)
        cells = rows["cell"].str.replace("epsilon=3", "epsilon=8")
        return rows.assign(seed=seeds.where(~other, seeds + 3).astype(str), cell=cells)

    edit(folders, change)


def copy_a_run_to_all_seeds(folders):
    def change(rows):
        first = rows[rows["seed"] == "0"].set_index("cell")["valid/accuracy"]
        return rows.assign(**{"valid/accuracy": rows["cell"].map(first)})

    edit(folders, change)


def leave_out_a_budget(folders):
    edit(folders, lambda rows: rows[~rows["cell"].str.contains("epsilon=3")], f"{ALONE}_mini.csv")
    replace(folders, "  mini:\n", "  mini:\n    privacy.epsilon: {3: null}\n")


def leave_out_a_file(folders):
    (folders.measured / "cifar_mini.csv").unlink()


def leave_out_a_sweep(folders):
    leave_out_a_file(folders)
    (folders.sweeps / "cifar.yaml").unlink()


def forget_all_baselines(folders):
    (folders.measured / CONSTANT).unlink()


def forget_one_baseline(folders):
    edit(folders, lambda rows: rows[rows["task"] != "cifar"], CONSTANT)


ABOUT = next(one for one in CLAIMS if one.contrast.sweep == "adaptivity" and len(one.contrast.plus) == 2)
"""A claim with a verdict in its favour; most changes are made in its rows."""
ALLOCATION, ON_PAR = (next(one for one in CLAIMS if one.contrast.sweep == sweep) for sweep in (ALONE, "cifar"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "claim"),
    [
        (drop_a_seed, ABOUT),
        (drop_a_seed_everywhere, ALLOCATION),
        (one_seed, ABOUT),
        (count_another_budget_as_seeds, ABOUT),
        (copy_a_run_to_all_seeds, ABOUT),
        (leave_out_a_budget, ALLOCATION),
        (leave_out_a_file, ON_PAR),
        (leave_out_a_sweep, ON_PAR),
        (forget_all_baselines, ABOUT),
        (forget_one_baseline, ABOUT),
    ],
    ids=lambda given: getattr(given, "__name__", ""),
)
def test_a_flattering_change_is_caught(change, claim, tmp_path):
    folders = Folders(ROOT / "results" / "paper", tmp_path / "measured", tmp_path / "sweeps")
    shutil.copytree(ROOT / "results" / "measured", folders.measured)
    shutil.copytree(ROOT / "sweeps", folders.sweeps)
    change(folders)
    try:
        found = [verdict for verdict in verdicts(folders) if verdict.claim is claim]
    except UserError:
        return
    assert found and all(verdict.word != AGREEMENT and verdict.why for verdict in found)
