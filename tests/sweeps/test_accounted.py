"""What an accounted search draws from, what it costs, and what it refuses."""

import re
from pathlib import Path

import pytest

from groupwise.config.compose import compose_run, register
from groupwise.config.identity import config_hash
from groupwise.errors import UserError
from groupwise.privacy.tuning import TruncatedNegativeBinomial
from groupwise.run import plan_run
from groupwise.sweeps.accounted import Search, plan_search
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


def test_given_noise_stays_as_it_is():
    search = planned("privacy.noise_multiplier=2", "tuning.eta=1")
    assert {setting.training.noise_multiplier for setting in search.settings} == {2.0}
    assert search.count == TruncatedNegativeBinomial.with_mean(1.0, 6.0)


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
        (
            ["task=samsum", "scale=smoke", "clip=per_device", "pipeline.stages=2"],
            "pipeline.stages=2 is not for a search",
        ),
        (["privacy.epsilon=3,8"], "privacy.epsilon is 3.0, 8.0 in its cells"),
        (["data.train_limit=100,200"], "data.train_limit is 100, 200 in its cells"),
        (["tuning.eta=0,1"], "tuning is"),
        (["privacy.epsilon=0.001"], "epsilon = 0.001 cannot be reached"),
        (["data.holdout=0.2"], "data.holdout=0.2 would score on training examples"),
        (["overwrite=true"], "overwrite=true would draw again"),
        (["tuning.eta=-1"], "eta is -1"),
        (["tuning.runs=1"], "give a number above 1"),
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
