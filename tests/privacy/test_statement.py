"""What a person reads before a run: every figure, and every limit."""

import dataclasses
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
        assert part in text
    assert "not a guarantee" not in text


def test_fixed_thresholds_have_no_share_for_counts():
    text = make_plan(**SETTING, noise_multiplier=5.0).statement()
    assert "1 clipping group." in text
    assert "sigma = 5.0000, all of it on gradients" in text
    assert "sigma_b" not in text


def test_shuffled_batches_are_as_published_and_no_guarantee():
    text = make_plan(**SETTING, epsilon=3.0, sampling="shuffle").statement()
    assert "as published, not a guarantee" in text.splitlines()[0]
    assert "for adding or removing" not in text


@pytest.mark.parametrize("sampling", ["poisson", "shuffle"])
def test_without_noise_nothing_is_promised(sampling):
    text = make_plan(**SETTING, epsilon=math.inf, sampling=sampling).statement()
    assert "no privacy guarantee" in text
    assert "epsilon =" not in text
    assert "Gaussian" not in text


def test_it_is_a_headline_and_three_more_lines_and_another_for_a_note():
    plan = make_plan(**SETTING, epsilon=3.0)
    lines = plan.statement().splitlines()
    assert len(lines) == 5 and lines[0].startswith("Privacy: ") and all(line.startswith("  ") for line in lines[1:])
    noted = dataclasses.replace(plan, note="by the PLD accountant, since").statement().splitlines()
    assert noted[:3] == [lines[0].replace("RDP", "PLD"), *lines[1:3]]
    assert noted[3:] == ["  Note: epsilon was found by the PLD accountant, since.", *lines[3:]]
    assert len(make_plan(**SETTING, epsilon=math.inf).statement().splitlines()) == 2


@pytest.mark.parametrize("accountant", ["rdp", "pld"])
def test_the_accountant_is_named(accountant):
    plan = dataclasses.replace(make_plan(**SETTING, noise_multiplier=5.0), accountant=accountant)
    assert f"({accountant.upper()}, upper bound)" in plan.statement()


def test_a_sigma_of_one_is_stated():
    assert "sigma = 1.0000" in make_plan(**SETTING, noise_multiplier=1.0).statement()
