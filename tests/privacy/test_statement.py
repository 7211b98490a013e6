"""The report of what was spent: which figure is quoted, and how it is written down."""

import json
import math

import pytest

from groupwise.privacy.accountants import EpsilonBounds
from groupwise.privacy.plan import EpsilonReport, make_plan

BOUNDS = EpsilonBounds(2.9, 3.0, 3.1)


def test_the_quoted_epsilon_is_always_an_upper_bound():
    quoted = {name: EpsilonReport(9, 1e-5, name, BOUNDS, 3.5, 3.05, True).epsilon for name in ("prv", "pld", "rdp")}
    assert quoted == {"prv": 3.1, "pld": 3.05, "rdp": 3.5}


def test_it_is_json_even_when_infinite():
    endless = EpsilonBounds(math.inf, math.inf, math.inf)
    written = EpsilonReport(9, 1e-5, "prv", endless, math.inf, None, False).to_dict()
    assert json.loads(json.dumps(written, allow_nan=False)) == written
    assert (written["epsilon"], written["prv"]["upper"], written["pld"]) == ("inf", "inf", None)


def test_pld_is_quoted_only_where_it_was_asked_for_and_answered():
    assert EpsilonReport(9, 1e-5, "pld", BOUNDS, 3.5, None, True).epsilon == 3.1
    assert EpsilonReport(9, 1e-5, "prv", BOUNDS, 3.5, 3.05, True).epsilon == 3.1


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


def test_shuffled_batches_are_as_published_and_no_guarantee():
    text = make_plan(**SETTING, epsilon=3.0, sampling="shuffle").statement()
    assert "as published, not a guarantee" in " ".join(text.split())
    assert "for adding or removing" not in " ".join(text.split())


@pytest.mark.parametrize("sampling", ["poisson", "shuffle"])
def test_without_noise_nothing_is_promised(sampling):
    text = make_plan(**SETTING, epsilon=math.inf, sampling=sampling).statement()
    assert "no privacy guarantee" in text
    assert "epsilon =" not in text
    assert "Gaussian" not in text


@pytest.mark.parametrize("sampling", ["poisson", "shuffle"])
@pytest.mark.parametrize("epsilon", [3.0, math.inf])
def test_it_fits_a_terminal(sampling, epsilon):
    plan = make_plan(**SETTING, epsilon=epsilon, sampling=sampling, num_groups=29, quantile_budget=0.01)
    lines = plan.statement().splitlines()
    assert max(map(len, lines)) <= 80
    assert all(line.startswith("  ") for line in lines[1:])
