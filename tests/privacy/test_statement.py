"""The report of what was spent: which figure is quoted, and how it is written down."""

import dataclasses
import json
import math
import re

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


def test_neither_bounds_nor_report_can_be_changed():
    report = EpsilonReport(9, 1e-5, "prv", BOUNDS, 3.5, None, True)
    with pytest.raises(dataclasses.FrozenInstanceError):
        report.rdp = 0.1
    with pytest.raises(dataclasses.FrozenInstanceError):
        BOUNDS.upper = 0.1
    assert BOUNDS.note == ""


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


def test_fixed_thresholds_have_no_share_for_counts():
    text = " ".join(make_plan(**SETTING, noise_multiplier=5.0).statement().split())
    assert "1 clipping group." in text
    assert "sigma = 5.0000, all of it on gradients" in text
    assert "sigma_b" not in text


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


def unfolded(plan):
    """The statement's sentences, which begin with a capital or a figure, one a line."""
    return re.sub(r"\n  (?![A-Z]|\d+ steps)", " ", plan.statement()).splitlines()


def test_it_is_a_headline_and_three_more_lines_and_another_for_a_note():
    plan = make_plan(**SETTING, epsilon=3.0)
    lines = unfolded(plan)
    assert [line.split()[0] for line in lines] == ["Privacy:", "300", "Gaussian", "Public:"]
    noted = unfolded(dataclasses.replace(plan, note="by the PLD accountant, since"))
    assert noted[:3] == [lines[0].replace("RDP", "PLD"), *lines[1:3]]
    assert noted[3:] == [
        "  Note: epsilon was found by the PLD accountant, since; it is an upper bound all the same.",
        *lines[3:],
    ]
    assert len(unfolded(make_plan(**SETTING, epsilon=math.inf))) == 2


@pytest.mark.parametrize("sampling", ["poisson", "shuffle"])
@pytest.mark.parametrize("epsilon", [3.0, math.inf])
def test_it_fits_a_terminal(sampling, epsilon):
    plan = make_plan(**SETTING, epsilon=epsilon, sampling=sampling, num_groups=29, quantile_budget=0.01)
    lines = plan.statement().splitlines()
    assert max(map(len, lines)) <= 80
    assert all(line.startswith("  ") for line in lines[1:])


def test_a_figure_stays_with_its_name_wherever_the_line_ends():
    for digits in range(1, 9):
        for sigma in (1.0, 1e2, 1e4, 1e6, 1e8):
            plan = make_plan(**SETTING, noise_multiplier=sigma, num_groups=29, quantile_budget=round(1 / 9, digits))
            text = plan.statement()
            assert not re.search(r"=\s*\n|\n\s*=", text), text
            assert "\xa0" not in text


@pytest.mark.parametrize("accountant", ["rdp", "pld"])
def test_the_accountant_is_named(accountant):
    plan = dataclasses.replace(make_plan(**SETTING, noise_multiplier=5.0), accountant=accountant)
    assert f"({accountant.upper()}, upper bound)" in plan.statement()


def test_a_sigma_of_one_is_stated():
    assert "sigma = 1.0000" in make_plan(**SETTING, noise_multiplier=1.0).statement()
