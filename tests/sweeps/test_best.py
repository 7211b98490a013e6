"""The best cell of a search has the best mean over seeds, among cells with all seeds."""

import pytest

from groupwise.sweeps.best import candidates, search_metric

ROWS = [
    ("clip=flat optim.learning_rate=1", ["90", "80"]),
    ("clip=flat optim.learning_rate=2", ["86", "88"]),
    ("clip=flat optim.learning_rate=4", ["99"]),  # one seed only
    ("clip=ghost optim.learning_rate=1", ["70", "nan"]),
    ("clip=ghost optim.learning_rate=2", ["60", "61"]),
]


@pytest.fixture
def rows():
    return [
        {"cell": cell, "seed": str(seed), "valid/accuracy": value, "valid/loss": value}
        for cell, values in ROWS
        for seed, value in enumerate(values)
    ]


def test_best_mean_of_each_mode_among_complete_cells(rows):
    found = candidates(rows, "valid/accuracy")
    chosen = found[found["best"]][["cell", "mean", "seeds"]].itertuples(index=False, name=None)
    assert list(chosen) == [(ROWS[1][0], 87.0, 2), (ROWS[4][0], 60.5, 2)]
    assert list(found["cell"][~found["whole"]]) == [ROWS[2][0], ROWS[3][0]]


def test_lower_loss_is_better(rows):
    found = candidates(rows, "valid/loss")
    assert list(found["cell"][found["best"]]) == [ROWS[0][0], ROWS[4][0]]


@pytest.mark.slow
def test_optuna_maximises_the_search_metric(checkout):
    checkout.write_sweep(
        """
        # @package _global_
        defaults:
          - override /hydra/sweeper: optuna
        hydra:
          sweeper:
            direction: maximize
            n_trials: 3
            n_jobs: 1
            sampler: {seed: 0}
            params: {seed: 'range(0, 5)', scale: smoke}
        """
    )
    done = checkout.command("run.py", "-m", "+sweep=table")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("ran adaptive_layer") == 3
    assert "best_value: 5" in (checkout.folder / "optimization_results.yaml").read_text()  # 50 + the seed


def test_search_metric_is_the_headline_metric():
    assert search_metric({"valid/loss": 1.0, "valid/accuracy": 90.0}) == 90.0
    assert search_metric({"valid/loss": 1.0, "valid/perplexity": 12.0}) == 12.0
    assert search_metric({}) is None
