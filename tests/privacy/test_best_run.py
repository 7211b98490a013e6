"""ε of the best of a random number of runs: known values, a closed form, and refused arguments."""

import re

import numpy as np
import pytest

from groupwise.errors import UserError
from groupwise.privacy.__main__ import main
from groupwise.privacy.accountants import best_run_epsilon, logseries_argument

CIFAR = (3.074, 0.08192, 3662, 1e-5)


def test_best_run_epsilon_matches_theorem_2():
    """The values are those of a second implementation, quoted in docs/errata.md."""
    assert best_run_epsilon(*CIFAR, 6) == pytest.approx(12.09, abs=0.005)
    assert best_run_epsilon(6.957, *CIFAR[1:], 6) == pytest.approx(5.01, abs=0.005)


def test_best_run_epsilon_matches_the_closed_form_for_one_gaussian():
    """Corollary 4, η = 0, for one Gaussian release of ρ = 1/2σ²: RDP ρλ + 2√(ρ log(1/γ)) - ρ + log E[K]/(λ-1)."""
    sigma, runs, delta = 4.0, 10.0, 1e-5
    rho, cost = 0.5 / sigma**2, -np.log1p(-logseries_argument(runs))
    orders = np.linspace(1.01, 500, 100_000)
    rdp = rho * orders + 2 * np.sqrt(rho * cost) - rho + np.log(runs) / (orders - 1)
    closed = np.min(rdp + np.log1p(-1 / orders) - np.log(delta * orders) / (orders - 1))
    assert best_run_epsilon(sigma, 1.0, 1, delta, runs) == pytest.approx(closed, rel=1e-2)
    assert best_run_epsilon(sigma, 1.0, 1, delta, runs) >= closed - 1e-9


@pytest.mark.parametrize("runs", [1.01, 2, 10, 1e5])
def test_numpy_draws_as_many_runs_as_are_expected(runs):
    p = logseries_argument(runs)
    assert p / ((1 - p) * -np.log1p(-p)) == pytest.approx(runs, rel=1e-4)
    if runs == 10:
        drawn = np.random.default_rng(0).logseries(p, 100_000)
        assert drawn.min() == 1 and drawn.mean() == pytest.approx(runs, abs=0.3)  # 5 standard errors


@pytest.mark.parametrize("runs", [1.0, 0.0, 2e5, float("nan")])
def test_other_numbers_of_runs_are_refused(runs):
    with pytest.raises(UserError, match="give their expected number, above 1"):
        best_run_epsilon(*CIFAR, runs)


def test_the_command_prints_the_epsilon_of_the_best_run(capsys):
    setting = ["sigma=3", "n=5000", "batch=500", "steps=100", "delta=1e-5"]
    assert main([*setting, "runs=10"]) == 0
    output = " ".join(capsys.readouterr().out.split())
    assert f"Search: epsilon = {best_run_epsilon(3.0, 0.1, 100, 1e-5, 10):.4g} at delta = 1e-05" in output
    assert float(re.search(r"logseries\(([\d.]+)\)", output)[1]) == pytest.approx(logseries_argument(10))
    assert main([*setting, "runs=1"]) == 2 and capsys.readouterr().out == ""
