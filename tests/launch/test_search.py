"""The searches that the project ships: the paper's grid, and Optuna, which is told a run's headline."""

from pathlib import Path

import pytest

from groupwise.sweeps.best import lower_is_better, objective
from groupwise.sweeps.cells import read_sweep

ROOT = Path(__file__).parents[2]


def test_the_grid_is_the_papers():
    cells = read_sweep(ROOT / "sweeps" / "search_sst2.yaml").cells("paper")
    assert len(cells) == 2 * 2 * 3**3 * 3  # modes, models, three choices of three, seeds
    assert all("data.holdout=0.2" in cell.name for cell in cells)


def test_the_objective_is_the_headline():
    assert objective({"valid/loss": 1.0, "valid/accuracy": 90.0}) == 90.0
    assert objective({"valid/loss": 1.0, "valid/perplexity": 12.0}) == 12.0
    assert objective({}) is None
    assert lower_is_better("valid/perplexity") and not lower_is_better("valid/accuracy")


@pytest.mark.slow
def test_optuna_chooses_by_it_and_goes_on_where_it_was(checkout):
    checkout.write_sweep(
        """
        hydra:
          sweeper:
            direction: maximize
            n_trials: 3
            n_jobs: 1
            sampler: {seed: 0}
            params: {seed: 'range(0, 5)', scale: smoke}
        """
    )
    forgotten = checkout.command("run.py", "-m", "+sweep=table")
    assert (forgotten.returncode, forgotten.stderr.count("\n")) == (2, 1)
    assert "add hydra/sweeper=optuna" in forgotten.stderr
    done = checkout.command("run.py", "-m", "+sweep=table", "hydra/sweeper=optuna")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("ran adaptive_layer") == 3
    assert "best_value: 5" in (checkout.folder / "optimization_results.yaml").read_text()  # 50 + the seed
