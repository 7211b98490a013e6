"""What an accounted search draws from, what it costs, and what it refuses."""

import math
import re
from pathlib import Path

import pytest

from groupwise.config.compose import compose_run, register
from groupwise.config.identity import config_hash
from groupwise.config.schema import TuningConfig
from groupwise.errors import UserError
from groupwise.privacy.tuning import Poisson, TruncatedNegativeBinomial
from groupwise.run import plan_run
from groupwise.sweeps.accounted import Search, count_of, plan_search
from groupwise.sweeps.prepare import plan_sweep
from tests.few_orders import few_orders

CONF = Path(__file__).parents[2] / "conf"
GRID = ("task=cifar", "scale=smoke", "clip=flat", "optim.learning_rate=1,2,4", "train.batch_size=8,16")
RDP = "privacy.accountant=rdp"


def planned(*words: str, grid=GRID, beside: Path | None = None) -> Search:
    register()
    given = [word for word in grid if word.split("=")[0] not in {word.split("=")[0] for word in words}]
    overrides = [*given, RDP, "tuning=accounted", *words]
    places = [] if beside is None else [f"hydra.searchpath=['file://{beside}']"]
    return plan_search(plan_sweep([*places, *overrides], CONF), overrides)


@pytest.fixture(scope="module", autouse=True)
def _at_few_orders(tmp_path_factory):
    with few_orders(tmp_path_factory.mktemp("cache")):
        yield


@pytest.fixture(scope="module")
def search() -> Search:
    return planned("privacy.epsilon=3", "privacy.delta=1e-3", "tuning.runs=6")


def test_the_budget_is_the_search_s(search):
    assert 0.997 * 3 <= search.cost.search <= 3 and search.cost.one_run < 2 and search.delta == 1e-3
    assert {setting.training.noise_multiplier > 0 for setting in search.settings} == {True}
    assert len({setting.training for setting in search.settings}) == 2  # of two batch sizes
    assert len(search.settings) == 6 and search.count.mean == pytest.approx(6)


def test_a_run_of_it_is_a_plain_run_with_that_noise(search):
    setting = search.settings[1]
    asked = ["task=cifar", "scale=smoke", "clip=flat", "optim.learning_rate=1", "train.batch_size=16", RDP]
    asked += ["privacy.delta=1e-3", f"privacy.noise_multiplier={setting.training.noise_multiplier!r}"]
    assert config_hash(setting.config) == config_hash(compose_run(asked, CONF))
    plan = plan_run(setting.config, search.examples, 3)
    assert (plan.sample_rate, plan.steps) == (setting.training.sample_rate, setting.training.steps)


def test_the_budget_may_be_a_run_s():
    search = planned("privacy.epsilon=3", "privacy.delta=1e-3", "tuning.target=run", "tuning.runs=6")
    assert 2.99 < search.cost.one_run <= 3 < search.cost.search
    asked = compose_run([*GRID[:3], RDP, "train.batch_size=8", "privacy.epsilon=3", "privacy.delta=1e-3"], CONF)
    assert search.settings[0].training.noise_multiplier == plan_run(asked, search.examples, 1).noise_multiplier


def test_given_noise_stays_as_it_is():
    search = planned("privacy.noise_multiplier=2", "tuning.law=poisson")
    assert {setting.training.noise_multiplier for setting in search.settings} == {2.0}
    assert search.count == Poisson(6.0)


def test_the_statement_has_the_figures(search):
    said = search.statement()
    words = " ".join(said.split())
    for part in ("6 runs expected", "one run epsilon", "all 6 settings epsilon", "at delta = 0.001"):
        assert part in words
    assert "one of the N examples that data.train_limit=256 left to train on" in words
    assert said.count("epsilon = ") == 3 and all(len(line) <= 80 for line in said.splitlines())


def test_so_small_a_grid_says_that_running_it_whole_costs_less():
    told = planned("privacy.epsilon=3", "optim.learning_rate=1,2", "train.batch_size=8").statement()
    assert "cost less if all of them are run" in told


def test_a_sweep_s_holdout_is_trained_on_and_one_of_the_command_line_refused(tmp_path):
    held = planned("privacy.noise_multiplier=2", "data.holdout=null")
    (tmp_path / "sweep").mkdir()
    grid = "{task: cifar, clip: flat, optim.learning_rate: [1, 2], data.holdout: 0.2}"
    text = f"grids: [{grid}]\nscales: {{smoke: {{}}}}\n"
    (tmp_path / "sweep" / "held.yaml").write_text(text)
    found = planned("+sweep=held", "privacy.noise_multiplier=2", grid=("scale=smoke",), beside=tmp_path)
    assert "data.holdout=0.2 is ignored" in found.statement() and "holdout" not in found.settings[0].name
    assert found.examples == held.examples and found.settings[0].config.data.holdout is None
    with pytest.raises(UserError, match=r"data\.holdout=0\.2 would score on training examples"):
        planned("privacy.noise_multiplier=2", "data.holdout=0.2")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["privacy=shuffle"], "privacy.sampling=shuffle has no valid RDP curve"),
        (["privacy=noiseless"], "a run without noise has no epsilon"),
        (["clip=none"], "a run without noise has no epsilon"),
        (["debug.noise_seed=1"], "so nothing is private: give debug.noise_seed=null."),
        (["data.public=true"], "so nothing is private: give data.public=false."),
        (["tracker=tensorboard"], "tracker=tensorboard would show every run"),
        (["explain=true"], "explain is of a single run"),
        (["hydra/launcher=joblib"], "leave hydra/launcher out"),
        (["clip=per_device", "pipeline.stages=2"], "pipeline.stages=2 is not for a search"),
        (["privacy.epsilon=3,8"], "privacy.epsilon is 3.0, 8.0 in its cells"),
        (["data.train_limit=100,200"], "data.train_limit is 100, 200 in its cells"),
        (["tuning.eta=0,1"], "tuning is"),
        (["privacy.epsilon=0.001"], "epsilon = 0.001 cannot be reached"),
        (["tuning.gamma=0.1", "tuning.runs=3"], "leave it out, or tuning.runs and tuning.law"),
        (["tuning.eta=-1"], "eta is -1"),
        (["tuning.runs=1"], "not a search"),
    ],
)
def test_what_has_no_epsilon_or_would_show_more_is_refused(words, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=re.escape(says)):
        planned(*words)
    assert not list(tmp_path.iterdir())


def test_a_task_of_one_s_own_must_say_that_its_score_is_of_others(tmp_path):
    (tmp_path / "task").mkdir()
    (tmp_path / "task" / "mine.yaml").write_text("# @package _global_\ntask: mine\nown_task: {_target_: mine.make}\n")
    words = ("task=mine", "scale=mini", "privacy.epsilon=3", "train.steps=2")
    with pytest.raises(UserError, match="what it validates on may be training examples: give"):
        planned(*words, beside=tmp_path)
    with pytest.raises(UserError, match="mine"):  # which is not there: it got as far as that
        planned(*words, "tuning.outside=true", beside=tmp_path)


@pytest.mark.parametrize(
    ("tuning", "count"),
    [
        (TuningConfig(), TruncatedNegativeBinomial.with_mean(0.0, 9.0)),
        (TuningConfig(eta=1.0, runs=20.0), TruncatedNegativeBinomial.with_mean(1.0, 20.0)),
        (TuningConfig(gamma=0.25, eta=1.0), TruncatedNegativeBinomial(1.0, 0.25)),
        (TuningConfig(law="poisson", runs=2.5), Poisson(2.5)),
    ],
)
def test_the_law_follows_from_the_configuration(tuning, count):
    found = count_of(tuning, 9)
    assert found == count and math.isfinite(found.mean)
