"""The printed statement of a plan."""

import math

import pytest

from groupwise.privacy.plan import make_plan

SETTING = {"dataset_size": 50_000, "expected_batch_size": 4096, "steps": 300, "delta": 1e-5, "accountant": "rdp"}


def test_figures_and_limits_are_in_the_text():
    plan = make_plan(**SETTING, epsilon=3.0, num_groups=29, quantile_budget=0.01)
    text = plan.statement()
    figures = [plan.noise_multiplier, plan.gradient_noise_multiplier]
    for part in (
        "epsilon = 3 at delta = 1e-05 (RDP, upper bound)",
        "adding or removing one training example",
        "300 steps",
        "batches of 4096 expected from 50000 examples",
        "poisson, rate 0.08192",
        "29 clipping groups",
        f"sigma = {figures[0]:.4f}",
        "r = 0.01",
        f"sigma_b = {plan.count_noise_multiplier:.4g}",
        f"sigma_new = {figures[1]:.4f}",
        "Public: the number of examples",
        "nonprivate/",
        "noise key",
        "floating-point",
    ):
        assert part in " ".join(text.split())
    assert "not a guarantee" not in text


def test_shuffled_batches_are_stated_to_give_no_guarantee():
    text = make_plan(**SETTING, epsilon=3.0, sampling="shuffle").statement()
    assert "as published, not a guarantee" in " ".join(text.split())
    assert "for adding or removing" not in " ".join(text.split())


@pytest.mark.parametrize("sampling", ["poisson", "shuffle"])
def test_without_noise_no_guarantee_is_stated(sampling):
    text = make_plan(**SETTING, epsilon=math.inf, sampling=sampling).statement()
    assert "no privacy guarantee" in text
    assert "epsilon =" not in text
    assert "Gaussian" not in text


@pytest.mark.parametrize("sampling", ["poisson", "shuffle"])
@pytest.mark.parametrize("epsilon", [3.0, math.inf])
def test_a_statement_fits_80_columns(sampling, epsilon):
    plan = make_plan(**SETTING, epsilon=epsilon, sampling=sampling, num_groups=29, quantile_budget=0.01)
    lines = plan.statement().splitlines()
    assert max(map(len, lines)) <= 80
    assert all(line.startswith("  ") for line in lines[1:])
