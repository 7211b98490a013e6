"""Every configuration composes, types and validates; the paper's cells are the paper's to the letter."""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import yaml

from groupwise.config import RunConfig
from groupwise.errors import UserError
from groupwise.launch.compose import compose_run
from groupwise.launch.epsilon_table import at_epsilon
from groupwise.launch.help import EVERYDAY
from groupwise.launch.keys import groups, key_types
from groupwise.training.identity import config_hash

CONF = Path(__file__).parents[1] / "conf"
OPTIONS = groups(CONF)
CELLS = list(itertools.product(*(OPTIONS[name] for name in ("task", "clip", "noise", "scale"))))


@cache  # composing costs a tenth of a second, and no test changes what it gets
def run(*overrides: str) -> RunConfig:
    return compose_run(list(overrides), CONF)


@pytest.mark.parametrize(("task", "clip", "scale"), sorted({(t, c, s) for t, c, _, s in CELLS}))
def test_every_cell_composes_into_the_schema_and_says_what_it_is(task: str, clip: str, scale: str) -> None:
    hashes = set()
    for noise in OPTIONS["noise"]:
        config = run(f"task={task}", f"clip={clip}", f"noise={noise}", f"scale={scale}")
        assert isinstance(config, RunConfig)
        assert (config.task, config.clip.name, config.noise.allocation, config.scale) == (
            task,
            clip,
            noise,
            scale,
        )
        hashes.add(config_hash(config))
    assert len(hashes) == len(OPTIONS["noise"])


@pytest.mark.parametrize(
    "choice",
    [f"{group}={option}" for group in ("model", "privacy", "optim", "tracker") for option in OPTIONS[group]],
)
def test_every_other_option_composes(choice: str) -> None:
    assert isinstance(run(choice), RunConfig)


@pytest.mark.parametrize("file", sorted(CONF.rglob("*.yaml")), ids=lambda file: str(file.relative_to(CONF)))
def test_every_file_begins_with_what_it_is_and_a_command_that_composes(file: Path) -> None:
    heading = list(itertools.takewhile(lambda line: line.startswith("#"), file.read_text().splitlines()))
    assert any(line.startswith("# ") and not line.startswith("# @package") for line in heading)
    [command] = re.findall(r"python run\.py (.*)", "\n".join(heading))
    run(*command.split())


# --- the paper, appendix A.1 ---


@pytest.mark.parametrize("clip", ["flat", "ghost", "fixed_layer", "adaptive_layer", "adaptive_flat"])
@pytest.mark.parametrize("epsilon", [1, 3, 5, 8])
def test_what_all_modes_share_is_the_papers(clip: str, epsilon: int) -> None:
    config = run("task=cifar", f"clip={clip}", f"privacy.epsilon={epsilon}")
    assert (config.optim.name, config.optim.weight_decay, config.optim.momentum) == ("sgd", 0, 0)
    assert (config.optim.schedule, config.optim.warmup) == ("constant", 0)
    assert (config.train.batch_size, config.train.epochs, config.train.steps) == (4096, 300, None)
    assert (config.privacy.epsilon, config.privacy.delta) == (epsilon, 1e-5)
    assert config.noise.allocation == "global"
    assert (config.data.name, config.data.image_size, config.data.train_limit) == ("cifar10", None, None)
    assert (config.model.depth, config.model.width, config.model.norm) == (16, 4, "group")
    assert config.model.weight_standardization
    assert config.scale == "paper"


@pytest.mark.parametrize("clip", ["flat", "ghost"])
def test_flat_clipping_is_at_one_with_the_rate_of_de_et_al(clip: str) -> None:
    config = run("task=cifar", f"clip={clip}")
    assert (config.clip.grouping, config.clip.policy) == ("flat", "fixed")
    assert (config.clip.threshold, config.optim.learning_rate) == (1.0, 4.0)


@pytest.mark.parametrize(("epsilon", "threshold", "rate"), [(3, 0.05, 40), (8, 0.1, 20)])
def test_fixed_per_layer_clipping_has_its_tuned_pairs(epsilon: int, threshold: float, rate: float) -> None:
    config = run("task=cifar", "clip=fixed_layer", f"privacy.epsilon={epsilon}")
    assert (config.clip.grouping, config.clip.policy) == ("layer", "fixed")
    assert (config.clip.threshold, config.optim.learning_rate) == (threshold, rate)


def test_adaptive_per_layer_clipping_is_the_papers() -> None:
    clip = run("task=cifar", "clip=adaptive_layer").clip
    assert (clip.grouping, clip.policy, clip.norms) == ("layer", "adaptive", "bookkeeping")
    assert (clip.threshold, clip.rescale) == (1.0, True)
    assert (clip.quantile_budget, clip.quantile_learning_rate) == (0.01, 0.3)
    assert clip.target_quantile in {0.5, 0.6, 0.7}
    assert run("task=cifar", "clip=adaptive_layer").optim.learning_rate in {2, 4}


# --- choosing ---


def test_the_default_is_the_papers_adaptive_per_layer_cell() -> None:
    assert run() == run("task=cifar", "clip=adaptive_layer", "scale=paper", "privacy.epsilon=8")


def test_everyday_keys_are_keys() -> None:
    assert {example.partition("=")[0] for example in EVERYDAY} <= set(key_types())
    config = run("privacy.epsilon=3", "noise=equal_budget", "clip.target_quantile=.7", "seed=1", "paths.data=elsewhere")
    assert (config.privacy.epsilon, config.noise.allocation, config.clip.target_quantile) == (
        3,
        "equal_budget",
        0.7,
    )
    assert (config.seed, config.paths.data) == (1, "elsewhere")


def test_data_are_looked_for_where_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GROUPWISE_DATA", "from-environment")
    assert compose_run([], CONF).paths.data == "from-environment"
    monkeypatch.delenv("GROUPWISE_DATA")
    assert compose_run([], CONF).paths.data == "data"


def test_a_chosen_optimiser_or_model_wins_over_recipe_and_scale() -> None:
    assert run("optim=adam").optim.learning_rate == 1e-3
    model = run("model=wrn16_4", "scale=demo").model
    assert (model.depth, model.width, model.norm_groups) == (16, 4, 16)
    assert run("model=wrn16_4", "model.width=2").model.width == 2


def test_demo_and_smoke_need_no_network() -> None:
    assert {run(f"scale={scale}").data.name for scale in ("demo", "smoke")} == {"digits"}


def test_without_clipping_epsilon_is_infinite() -> None:
    config = run("clip=none")
    assert config.clip.grouping == "none"
    assert config.privacy.epsilon == math.inf


def test_a_given_noise_multiplier_takes_the_place_of_epsilon() -> None:
    privacy = run("privacy.noise_multiplier=2.5").privacy
    assert (privacy.epsilon, privacy.noise_multiplier) == (None, 2.5)


@pytest.mark.parametrize(
    ("epsilon", "entry"),
    [(3, "a"), (8, "b"), (1, "a"), (4.8, "a"), (5, "b"), (100, "b"), (None, "b"), (math.inf, "b")],
)
def test_a_value_between_the_tuned_epsilons_is_that_of_the_nearest_in_ratio(epsilon: float, entry: str) -> None:
    assert at_epsilon({8: "b", 3: "a"}, epsilon) == entry


def test_the_keys_of_all_files_are_keys_of_the_schema() -> None:
    # Composition checks this for chosen files; here, a file that no choice reaches is a file too many.
    tasks = OPTIONS["task"]
    for task in tasks:
        assert sorted(f.stem for f in (CONF / "recipe" / task).glob("*.yaml")) == OPTIONS["clip"]
        assert sorted(f.stem for f in (CONF / "size" / task).glob("*.yaml")) == OPTIONS["scale"]
    tuned = {tuple(f.relative_to(CONF / "tuned").with_suffix("").parts) for f in (CONF / "tuned").rglob("*.yaml")}
    assert tuned <= set(itertools.product(tasks, OPTIONS["scale"], OPTIONS["clip"]))
    assert yaml.safe_load((CONF / "config.yaml").read_text())["seed"] == 0


# --- refusals ---

REFUSED = [
    ("privacy.epsilon=0", "greater than zero"),
    ("privacy.epsilon=-1", "greater than zero"),
    ("privacy.epsilon=nan", "greater than zero"),
    ("privacy.epsilon=null", "both null"),
    ("privacy.delta=0", "between 0 and 1"),
    ("privacy.delta=1", "between 0 and 1"),
    ("privacy.noise_multiplier=-1", "zero or more"),
    ("clip.quantile_budget=0", "share of the privacy budget"),
    ("clip.quantile_budget=1", "share of the privacy budget"),
    ("clip.target_quantile=1.5", "between 0 and 1"),
    ("train.batch_size=0", "greater than zero"),
    ("train.microbatch=0", "greater than zero"),
    ("train.steps=-3", "greater than zero"),
    ("train.epochs=inf", "finite"),
    ("optim.learning_rate=0", "greater than zero"),
    ("optim.learning_rate=nan", "greater than zero"),
    ("optim.momentum=1", "[0, 1)"),
    ("optim.warmup=-0.1", "[0, 1)"),
    ("seed=-1", "zero or more"),
    ("clip.minimum=2 clip.maximum=1", "above"),
    ("clip.norms=ghost", "clip.grouping must be flat"),
    ("clip=ghost clip.grouping=layer", "clip.grouping must be flat"),
    ("clip=adaptive_flat clip.rescale=true", "pins the one threshold"),
    ("clip=flat clip.grouping=custom", "needs clip.mapping"),
    ("clip=flat +clip.mapping={a:b}", "only with clip.grouping=custom"),
    ("clip=flat clip.rule=automatic clip.gamma=0", "zero norm"),
    ("clip=flat clip.threshold=inf", "must be finite"),
    ("clip=none clip.policy=adaptive", "no threshold to adapt"),
    ("clip=none privacy.noise_multiplier=1", "unbounded sensitivity"),
    ("clip=none privacy.epsilon=3", "cannot be kept"),
    ("model.norm=batch", "mixes the examples"),
    ("clip.rule=automatc", "did you mean automatic?"),
    ("noise.allocation=gloabl", "did you mean global?"),
    ("train.precision=float16", "not one of float32, bfloat16"),
    ("resume=somewhere overwrite=true", "throw away"),
]


@pytest.mark.parametrize(("overrides", "reason"), REFUSED)
def test_what_cannot_be_meant_is_refused_in_one_sentence(overrides: str, reason: str) -> None:
    with pytest.raises(UserError) as refused:
        run(*overrides.split())
    message = str(refused.value)
    assert reason in message
    assert "\n" not in message and len(message) < 300


@pytest.mark.parametrize(
    "overrides",
    [
        "clip.rescale=true noise=weighted",
        "train.precision=bfloat16 train.compile=true",
        "clip=flat clip.rule=automatic",
        "clip=flat privacy.epsilon=inf clip.threshold=1e9",
        "clip=none model.norm=batch",
        "clip=flat clip.grouping=custom +clip.mapping={stem*:early,*:late}",
        "clip=ghost privacy=shuffle",
        "clip.rescale=false clip.initial_threshold=0.01",
    ],
)
def test_what_can_be_meant_is_not_refused(overrides: str) -> None:
    run(*overrides.split())


def test_a_config_made_in_python_is_checked_the_same_way() -> None:
    config = RunConfig()
    config.validate()
    with pytest.raises(UserError, match="greater than zero"):
        replace(config, privacy=replace(config.privacy, epsilon=-1)).validate()
