"""A privacy plan: made from ε or σ, refused if inconsistent, and not called private where it guarantees nothing."""

import dataclasses
import json
import linecache
import math
import warnings

import numpy as np
import pytest

from groupwise.errors import UserError
from groupwise.privacy import accounting, calibration
from groupwise.privacy.plan import PrivacyPlan, composed_epsilon, make_plan

SETTING = {"dataset_size": 5000, "expected_batch_size": 100, "steps": 200, "delta": 1e-5}


@pytest.fixture(scope="module")
def plan() -> PrivacyPlan:
    """ε = 3 with 16 groups and 1 % of the budget for their quantiles."""
    return make_plan(**SETTING, epsilon=3.0, num_groups=16, quantile_budget=0.01)


def make(**changes) -> PrivacyPlan:
    return make_plan(**{**SETTING, "epsilon": 3.0, "accountant": "rdp", **changes})


def test_numpy_numbers_become_python_numbers():
    numbers = {name: np.array(value)[()] for name, value in {**SETTING, "epsilon": 3.0, "num_groups": 2}.items()}
    plan = make_plan(**numbers, quantile_budget=np.float64(0.25), accountant="rdp")
    assert {type(value) for value in dataclasses.asdict(plan).values()} == {int, float, str}
    assert plan == make(num_groups=2, quantile_budget=0.25)
    assert type(make(epsilon=None, noise_multiplier=np.float32(1.5)).noise_multiplier) is float


def test_a_plan_holds_its_settings_and_follows_the_formulas(plan):
    assert plan.sample_rate == 0.02
    assert (plan.adjacency, plan.sampling, plan.accountant, plan.note) == ("add_remove", "poisson", "prv", "")
    assert plan.epsilon == 3.0
    assert plan.is_private
    assert plan.count_noise_multiplier == pytest.approx(plan.noise_multiplier * math.sqrt(16 / 0.04))
    assert plan.gradient_noise_multiplier == pytest.approx(plan.noise_multiplier / math.sqrt(0.99))


def test_epsilon_of_a_given_sigma_is_an_upper_bound(plan):
    back = make_plan(**SETTING, noise_multiplier=plan.noise_multiplier)
    assert 0.999 * 3.0 <= back.epsilon <= 3.0
    assert back.spent(200).epsilon == back.epsilon


def test_the_spent_epsilon_is_at_most_the_target(plan):
    report = plan.spent(200)
    assert report.epsilon <= plan.epsilon
    assert report.epsilon == report.prv.upper
    assert report.prv.upper <= report.rdp
    assert report.guaranteed
    assert plan.spent_epsilon(100) == plan.spent(100).epsilon < report.epsilon < plan.spent(201).epsilon


def test_spent_epsilon_uses_the_plans_accountant_alone(monkeypatch):
    plan = make()
    expected = {steps: plan.spent(steps).epsilon for steps in (1, 200)}
    monkeypatch.delattr(accounting, "epsilon_prv")
    accounting._composed.cache_clear()
    assert {steps: plan.spent_epsilon(steps) for steps in (1, 200)} == expected
    assert make(epsilon=math.inf).spent_epsilon(1) == math.inf


def test_nothing_is_spent_before_the_first_step(plan):
    assert plan.spent(0).epsilon == plan.spent_epsilon(0) == 0.0
    assert plan.progress(0) == 0.0


@pytest.mark.parametrize("executed", [-1, 1.5, math.nan])
def test_invalid_numbers_of_executed_steps_are_refused(plan, executed):
    for spend in (plan.spent, plan.spent_epsilon):
        with pytest.raises(UserError, match="executed_steps"):
            spend(executed)


@pytest.mark.parametrize("accountant", ["rdp", "pld"])
def test_the_report_quotes_the_plans_accountant(accountant):
    plan = make_plan(**{**SETTING, "expected_batch_size": 5000}, noise_multiplier=100.0, accountant=accountant)
    report = plan.spent(200)
    assert plan.spent_epsilon(200) == report.epsilon == getattr(report, accountant) == plan.epsilon
    for steps in (0, 200):
        assert (plan.spent(steps).pld is None) == (accountant != "pld")


def test_a_plan_is_read_back_from_json(plan):
    for original in (plan, make(epsilon=math.inf), make(sampling="shuffle", quantile_budget=0.1)):
        assert PrivacyPlan.from_dict(json.loads(json.dumps(original.to_dict(), allow_nan=False))) == original


def test_a_saved_plan_with_other_fields_is_refused(plan):
    saved = plan.to_dict()
    saved.pop("delta")
    with pytest.raises(UserError, match="colour, delta differ;"):
        PrivacyPlan.from_dict({**saved, "colour": "red"})


NO_NOISE = {"noise_multiplier": 0.0, "count_noise_multiplier": 0.0, "gradient_noise_multiplier": 0.0}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"gradient_noise_multiplier": 0.5}, "noise scales .* are"),
        ({"count_noise_multiplier": 0.5}, "noise scales .* are"),
        ({"noise_multiplier": 0.5}, "noise scales .* are"),
        ({"quantile_budget": 0.5}, "noise scales .* are"),
        ({"num_groups": 17}, "noise scales .* are"),
        ({"quantile_budget": 0.0}, "noise scales .* are"),
        (NO_NOISE, "noise if and only if its epsilon is finite"),
        ({"epsilon": math.inf}, "noise if and only if its epsilon is finite"),
        *(({"noise_multiplier": sigma}, "make it with make_plan") for sigma in (-1.0, math.inf, math.nan)),
        *(({"epsilon": epsilon}, "make it with make_plan") for epsilon in (math.nan, -1e-9, -1.0)),
        ({"adjacency": "replace"}, "add_remove"),
    ],
)
def test_an_inconsistent_plan_is_refused(plan, change, reason):
    with pytest.raises(UserError, match=reason):
        dataclasses.replace(plan, **change)


@pytest.mark.parametrize("given", [{"epsilon": math.inf}, {"epsilon": None, "noise_multiplier": 0.0}])
def test_a_run_without_noise_has_no_guarantee(given):
    plan = make(**given, num_groups=4, quantile_budget=0.1)
    assert plan.epsilon == math.inf
    scales = (plan.noise_multiplier, plan.count_noise_multiplier, plan.gradient_noise_multiplier)
    assert scales == (0.0, 0.0, 0.0)
    assert not plan.is_private
    assert plan.progress(1) == math.inf
    report = plan.spent(200)
    assert report.epsilon == math.inf
    assert not report.guaranteed
    assert report.to_dict()["prv"]["upper"] == "inf"
    json.dumps(report.to_dict(), allow_nan=False)


def test_shuffled_batches_are_never_called_private():
    plan = make(sampling="shuffle")
    assert plan.noise_multiplier == make().noise_multiplier
    assert not plan.is_private
    assert not plan.spent(10).guaranteed


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"epsilon": 0.0}, "epsilon is 0"),
        ({"epsilon": -1.0}, "epsilon is -1"),
        ({"epsilon": math.nan}, "epsilon is nan"),
        ({"noise_multiplier": 1.0}, "exactly one of"),
        ({"epsilon": None}, "exactly one of"),
        ({"epsilon": None, "noise_multiplier": -1.0}, "noise_multiplier"),
        ({"epsilon": None, "noise_multiplier": math.nan}, "noise_multiplier"),
        ({"epsilon": None, "noise_multiplier": math.inf}, "noise_multiplier"),
        ({"delta": 0.0}, "delta"),
        ({"delta": -1e-5}, "delta"),
        ({"delta": 1.0}, "delta"),
        ({"delta": math.nan}, "delta"),
        ({"quantile_budget": 1.0}, "no budget for the gradients"),
        ({"quantile_budget": -0.1}, "quantile_budget"),
        ({"quantile_budget": math.nan}, "quantile_budget"),
        ({"expected_batch_size": 5001}, "at most N"),
        ({"expected_batch_size": 0}, "give B above 0"),
        ({"steps": 0}, "steps"),
        ({"steps": 1.5}, "steps"),
        ({"dataset_size": 0}, "dataset_size"),
        ({"dataset_size": math.nan}, "dataset_size"),
        ({"num_groups": 0}, "num_groups"),
        ({"num_groups": 1.5}, "num_groups"),
        ({"sampling": "fixed"}, "choose one of poisson, shuffle"),
        ({"accountant": "gdp"}, "choose one of prv, pld, rdp"),
    ],
)
def test_invalid_arguments_are_refused_before_the_search(changes, reason, monkeypatch):
    def search(*_, **__):
        raise AssertionError("searched first")

    monkeypatch.setattr(calibration, "_search", search)
    with pytest.raises(UserError, match=reason):
        make(**changes)


def test_a_delta_of_one_over_n_warns_where_the_plan_is_made():
    with pytest.warns(UserWarning, match="not below 1/N") as caught:
        make(delta=1 / 5000)
    assert caught[0].filename == __file__
    assert "make_plan(" in linecache.getline(__file__, caught[0].lineno)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make(delta=0.9 / 5000)


def test_the_epsilon_of_all_planned_steps_is_not_composed_again(cold, monkeypatch):
    plan = make_plan(**SETTING, noise_multiplier=1.0)
    composed = []
    compose = accounting._compose
    monkeypatch.setattr(accounting, "_compose", lambda *mechanism: composed.append(mechanism[2]) or compose(*mechanism))
    assert plan.spent(200).epsilon == plan.epsilon and not composed
    assert plan.spent(100).epsilon < plan.epsilon and set(composed) == {100}


def test_a_plan_for_which_prv_failed_names_pld_and_keeps_its_bound(cold, broken_prv):
    plan = make_plan(**{**SETTING, "expected_batch_size": 5000, "steps": 4}, epsilon=0.5)
    report = plan.spent(4)
    assert report.epsilon == report.prv.upper <= 0.5
    assert "PLD" in report.prv.note
    headline = plan.statement().splitlines()[0]
    assert "(upper bound)" in headline
    assert "PRV" not in headline


def test_a_large_delta_without_noise_gives_neither_warning_nor_note():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert make(epsilon=math.inf, delta=0.5).note == ""


@pytest.mark.parametrize("given", [{"epsilon": 0.5}, {"epsilon": 3.0}, {"epsilon": None, "noise_multiplier": 0.5}])
def test_progress_is_between_the_spent_epsilon_and_the_target(given):
    plan = make(**given)
    assert plan.is_private
    for steps in (5, 200):
        assert plan.spent(steps).prv.lower <= plan.progress(steps) <= plan.epsilon
    assert plan.progress(100) == min(plan.epsilon, plan.spent(100).epsilon)  # the end of a twentieth of 200
    assert plan.progress(0) == 0.0 and plan.progress(300) > plan.epsilon


def test_composed_epsilon_is_less_than_the_sum_of_the_budgets():
    first, second = make(epsilon=2, accountant="prv"), make(epsilon=1.5, steps=50, accountant="prv")
    together = composed_epsilon([first, second], 1e-5)
    assert max(first.epsilon, second.epsilon) < together < first.epsilon + second.epsilon
    halves = [make(epsilon=None, noise_multiplier=1.0, steps=100, accountant="pld")] * 2
    both = make(epsilon=None, noise_multiplier=1.0, steps=200, accountant="pld")
    assert composed_epsilon(halves, 1e-5) == pytest.approx(both.epsilon, rel=1e-3)
    assert composed_epsilon([first, make(sampling="shuffle")], 1e-5) == math.inf and composed_epsilon([], 1e-5) == 0.0
    with pytest.raises(UserError, match="delta is 0"):
        composed_epsilon([first], 0)
