"""Every configuration composes and is valid, cells have the paper's settings, and invalid settings are refused."""

import itertools
import math
import re
from operator import attrgetter
from pathlib import Path

import pytest

from groupwise.config.compose import compose_run
from groupwise.config.identity import config_hash
from groupwise.config.keys import key_types
from groupwise.config.resolvers import at_epsilon, by
from groupwise.config.schema import RunConfig
from groupwise.errors import UserError
from tests.combinations import CELLS, CONF, FAMILIES, OPTIONS, SCALES, pairs_fast, run

pytestmark = pytest.mark.usefixtures("every_tracker_is_installed")
PRESETS = {"samsum_pipeline": "samsum"}
"""Options of `task` that are presets of another task."""


@pytest.mark.parametrize(("task", "clip", "scale"), pairs_fast(CELLS))
def test_every_cell_composes_into_the_schema_under_its_own_names(task: str, clip: str, scale: str) -> None:
    config = run(f"task={task}", f"clip={clip}", f"scale={scale}")
    assert isinstance(config, RunConfig)
    assert (config.task, config.clip.name, config.scale) == (PRESETS.get(task, task), clip, scale)


def test_each_choice_has_its_own_config_hash() -> None:
    choices = [f"{group}={option}" for group in ("task", "noise", "scale") for option in OPTIONS[group]]
    hashes = [config_hash(run(choice)) for choice in choices]
    assert len({*hashes}) == len(hashes) - 2  # noise=global and scale=paper are the default, as task=cifar is


def heading(file: Path) -> list[str]:
    return list(itertools.takewhile(lambda line: line.startswith("#"), file.read_text().splitlines()))


def command(file: Path) -> list[str]:
    """The arguments of the `python run.py` command in a file's heading."""
    [typed] = re.findall(r"python run\.py (.*)", "\n".join(heading(file)))
    typed = typed.replace("task=mine --config-dir my_conf", "recipe=own")  # a user's own task is not in conf/
    return [word for word in typed.split() if word != "-m"]


@pytest.mark.parametrize("file", sorted(CONF.rglob("*.yaml")), ids=lambda file: str(file.relative_to(CONF)))
def test_every_file_begins_with_a_description_and_a_command_that_composes(file: Path) -> None:
    assert any(line.startswith("# ") and not line.startswith("# @package") for line in heading(file))
    assert isinstance(run(*command(file)), RunConfig)


@pytest.mark.parametrize(
    "choice",
    [
        f"{group}={option}"
        for group in ("model", "privacy", "optim", "tracker")
        for option in OPTIONS[group]
        if f"{group}={option}" not in command(CONF / group / f"{option}.yaml")
    ],
)
def test_every_option_that_is_not_in_its_own_files_command_composes(choice: str) -> None:
    assert isinstance(run(choice), RunConfig)


# --- the paper's settings that results/paper/hyperparameters_*.csv does not list (tests/analysis checks those) ---

ADAPTERS = {"model.trains": "lora", "model.lora.rank": 32, "train.microbatch": 1, "pipeline.rematerialize": True}
PAPER = {
    "task=cifar clip=flat": {
        "optim.name": "sgd", "optim.schedule": "constant", "optim.warmup": 0, "optim.learning_rate": 4.0,
        "privacy.delta": 1e-5, "noise.allocation": "global", "clip.threshold": 1.0, "data.name": "cifar10",
        "model.depth": 16, "model.width": 4, "model.weight_standardization": True,
    },
    "task=cifar clip=fixed_layer privacy.epsilon=3": {"clip.threshold": 0.05, "optim.learning_rate": 40},
    "task=cifar clip=fixed_layer privacy.epsilon=8": {"clip.threshold": 0.1, "optim.learning_rate": 20},
    "task=cifar clip=adaptive_layer": {"clip.threshold": 1.0, "clip.rescale": True, "clip.norms": "bookkeeping"},
    "task=sst2 clip=adaptive_layer": {"optim.name": "adam", "optim.schedule": "linear", "clip.rescale": False},
    "task=e2e model=gpt2 clip=adaptive_layer": {
        "optim.name": "adam", "optim.schedule": "linear", "optim.warmup": 0, "privacy.delta": 8e-6,
        "clip.rescale": False, "noise.allocation": "global",
    },
    "task=dart model=gpt2 clip=adaptive_layer": {
        "privacy.delta": 1e-5, "optim.learning_rate": 2e-3, "clip.target_quantile": 0.3,
    },
    "task=samsum clip=flat": {"model.name": "gpt2_xl", "train.epochs": 5, "eval.generate.beams": 4},
    "task=samsum_pipeline pipeline.stages=4": ADAPTERS,
    "task=samsum_pipeline pipeline.stages=16 model=opt_175b": {**ADAPTERS, "model.lora.targets": ["q_proj", "v_proj"]},
    "scale=midi": {"model.depth": 16, "model.width": 1, "data.name": "cifar10", "data.image_size": 16},
    "task=e2e scale=midi": {"model.source": "pretrained/gpt2_midi_e2e", "data.train_file": None},
    "task=dart scale=midi": {"model.source": "pretrained/gpt2_midi_dart", "data.train_file": "webnlg2017-train.json"},
    "scale=demo": {"data.name": "digits"},
    "clip=none": {"clip.grouping": "none", "privacy.epsilon": math.inf},
}  # fmt: skip


@pytest.mark.parametrize("cell", PAPER)
def test_a_cell_has_the_papers_settings(cell: str) -> None:
    config = run(*cell.split())
    assert {key: attrgetter(key)(config) for key in PAPER[cell]} == PAPER[cell]


@pytest.mark.parametrize("stages", [1, 4, 16])
def test_per_device_clipping_on_samsum_has_the_papers_settings(stages: int) -> None:
    config = run("task=samsum_pipeline", f"pipeline.stages={stages}")
    assert (config.clip.grouping, config.clip.policy, config.noise.allocation) == ("device", "fixed", "equal_budget")
    assert config.clip.threshold / math.sqrt(stages) == pytest.approx(1e-5, rel=1e-12)


def test_adapter_settings_are_refused_where_no_adapters_train() -> None:
    with pytest.raises(UserError, match=r"lora\.rank=4 changes nothing: .* choose model\.trains=lora"):
        compose_run(["task=e2e", "model.lora.rank=4"], CONF)
    for adapters in (["task=e2e", "model.trains=lora"], ["task=samsum"]):
        assert compose_run([*adapters, "model.lora.rank=4"], CONF).model.lora.rank == 4
    default = compose_run(["task=e2e", "model=gpt2_mini", "scale=mini"], CONF).model
    assert (default.lora.rank, default.trains) == (16, "all")  # from the model's own recipe


def test_a_threshold_that_has_no_effect_is_refused() -> None:
    with pytest.raises(UserError, match=r"clip\.threshold=2 changes nothing: .* clip\.initial_threshold="):
        compose_run(["task=sst2", "clip=adaptive_layer", "clip.threshold=2"], CONF)
    for typed in (["clip=flat"], ["clip=adaptive_layer", "clip.rescale=true"]):
        assert compose_run(["task=sst2", *typed, "clip.threshold=2"], CONF).clip.threshold == 2


@pytest.mark.parametrize(
    ("mode", "override", "instead"),
    [
        ("clip=fixed_layer", "clip.quantile_budget=0.1", "clip.policy=adaptive"),
        ("clip=fixed_layer", "clip.rescale=false", "clip.policy=adaptive"),
        ("clip=flat", "++clip.gamma=0.1", "clip.rule=automatic"),
        ("clip=none", "clip.rule=automatic", ""),
        ("optim.name=sgd", "optim.beta1=0.8", "optim.name=adam"),
        ("optim.name=adamw", "optim.momentum=0.8", "optim.name=sgd"),
    ],
)
def test_a_setting_that_has_no_effect_is_refused_only_if_it_was_typed(mode, override, instead) -> None:
    with pytest.raises(UserError, match=rf"{override.lstrip('+')} changes nothing: .*{instead}"):
        compose_run([mode, override], CONF)
    assert compose_run([mode, override], CONF, typed=False) != compose_run([mode], CONF)
    if instead:
        assert compose_run([instead, override], CONF)


def test_the_default_is_the_papers_adaptive_per_layer_cell() -> None:
    assert run() == run("task=cifar", "clip=adaptive_layer", "scale=paper", "privacy.epsilon=8")


def test_everyday_keys_in_the_help_exist() -> None:
    typed = (CONF / "hydra" / "help" / "groupwise.yaml").read_text().partition("Everyday keys")[2].partition("More:")[0]
    assert set(re.findall(r"^ +([\w.]+)=", typed, re.MULTILINE)) <= set(key_types())
    config = run("privacy.epsilon=3", "noise=equal_budget", "clip.target_quantile=.7", "seed=1", "paths.data=elsewhere")
    assert (config.privacy.epsilon, config.noise.allocation, config.clip.target_quantile) == (3, "equal_budget", 0.7)
    assert (config.seed, config.paths.data) == (1, "elsewhere")


@pytest.mark.parametrize(
    ("variable", "typed", "key", "without"),
    [("GROUPWISE_DATA", "task=sst2", "paths.data", "data"), ("WANDB_MODE", "tracker=wandb", "tracker.mode", "offline")],
)
def test_the_environment_gives_a_default(variable, typed, key, without, monkeypatch: pytest.MonkeyPatch) -> None:
    value = attrgetter(key)
    monkeypatch.delenv(variable, raising=False)
    assert value(compose_run([typed], CONF)) == without
    monkeypatch.setenv(variable, "online")
    assert value(compose_run([typed], CONF)) == "online"
    assert value(compose_run([typed, f"{key}=disabled"], CONF)) == "disabled"


def test_a_chosen_optimiser_or_model_overrides_recipe_and_scale() -> None:
    assert run("optim=adam").optim.learning_rate == 1e-3
    model = run("model=wrn16_4", "scale=demo").model
    assert (model.depth, model.width, model.norm_groups) == (16, 4, 16)
    assert run("model=wrn16_4", "model.width=2").model.width == 2


def test_a_noise_multiplier_replaces_the_default_epsilon_but_not_a_given_one() -> None:
    with pytest.raises(UserError, match="are both given: give one"):
        run("privacy.noise_multiplier=2.5", "privacy.epsilon=3")
    privacy = run("privacy.noise_multiplier=2.5").privacy
    assert (privacy.epsilon, privacy.noise_multiplier) == (None, 2.5)


@pytest.mark.parametrize(
    ("epsilon", "entry"), [(3, "a"), (8, "b"), (1, "a"), (4.8, "a"), (5, "b"), (100, "b"), (None, "b"), (math.inf, "b")]
)
def test_an_untuned_epsilon_takes_the_value_of_the_tuned_one_nearest_in_ratio(epsilon: float, entry: str) -> None:
    assert at_epsilon({8: "b", 3: "a"}, epsilon) == entry


def test_infinite_epsilon_takes_its_own_tuned_value_if_there_is_one() -> None:
    table = {3: "a", 8: "b", math.inf: "c"}
    assert [at_epsilon(table, epsilon) for epsilon in (100, 1e300, math.inf, None)] == ["b", "b", "c", "b"]


def test_every_recipe_has_the_common_scales() -> None:
    assert {*FAMILIES.values(), "own"} == {file.stem for file in (CONF / "recipe").glob("*.yaml")}
    for task in FAMILIES:
        assert {"paper", "mini", "demo", "smoke"} <= {*SCALES[task]} <= {*OPTIONS["scale"]}
    for scale in OPTIONS["scale"]:
        assert run("recipe=own", f"scale={scale}").model.name == "own"


def test_the_first_pattern_that_matches_gives_the_value() -> None:
    table = {"adaptive_flat": 1, "adaptive_*": 2, "*": 3}
    assert [by(name, table) for name in ("adaptive_flat", "adaptive_layer", "flat", 7)] == [1, 2, 3, 3]
    with pytest.raises(UserError, match="flat is not one of none: set the key"):
        by("flat", {"none": 1})


REFUSED = [
    ("privacy.epsilon=0", "greater than zero"),
    ("privacy.epsilon=nan", "greater than zero"),
    ("privacy.epsilon=null", "both null"),
    ("privacy.delta=0", "in (0, 1)"),
    ("privacy.noise_multiplier=-1", "zero or more"),
    ("clip.quantile_budget=0", "in (0, 1)"),
    ("clip.target_quantile=1.5", "in (0, 1)"),
    ("train.batch_size=0", "greater than zero"),
    ("train.sample_rate=0.1", "both given"),
    ("train.batch_size=null", "both null"),
    ("train.batch_size=null train.sample_rate=2", "at most 1"),
    ("eval.shots=4", "nothing to clip"),
    ("eval.shots=-1 clip=none", "zero or more"),
    ("eval.shots=4 clip=none export=folder", "export=folder cannot be combined with eval.shots"),
    ("eval.prompt_set=3", "at most 2"),
    ("model.trains=heads", "attention, bias, lora"),
    ("model.lora.rank=0", "greater than zero"),
    ("model.dropout=1", "[0, 1)"),
    ("data.holdout=1.2", "[0, 1)"),
    ("train.token_loss=max", "mean, sum"),
    ("model.rematerialize=true", "model.rematerialize=true cannot be combined with model.name=wide_resnet"),
    ("paths.results=", "paths.results= cannot be written (it is empty)"),
    ("model.frozen_dtype=bfloat16", "needs train.precision=bfloat16"),
    ("train.microbatch=0", "greater than zero"),
    ("train.steps=-3", "greater than zero"),
    ("train.epochs=inf", "finite"),
    ("optim.learning_rate=0", "greater than zero"),
    ("optim.momentum=1", "[0, 1)"),
    ("optim.warmup=-0.1", "[0, 1)"),
    ("seed=-1", "zero or more"),
    ("clip.norms=ghost", "clip.grouping must be flat"),
    ("clip=ghost clip.grouping=layer", "clip.grouping must be flat"),
    ("clip.minimum=2 clip.maximum=1", "above"),
    ("clip=adaptive_flat clip.rescale=true", "rescales the only threshold"),
    ("clip=flat clip.grouping=custom", "needs clip.mapping"),
    ("clip=flat +clip.mapping={a:b}", "no effect with clip.grouping=flat"),
    ("clip=flat clip.rule=automatic clip.gamma=0", "if a norm is 0"),
    ("clip=flat clip.threshold=inf", "must be finite"),
    ("clip=none clip.policy=adaptive", "no threshold to adapt"),
    ("clip=none privacy.noise_multiplier=1", "sensitivity is unbounded"),
    ("clip=none privacy.epsilon=3", "cannot be guaranteed"),
    ("clip.rule=automatc", "did you mean automatic?"),
    ("noise.allocation=gloabl", "did you mean global?"),
    ("train.precision=float16", "not one of float32, tf32, bfloat16"),
    ("resume=somewhere overwrite=true", "would delete the run"),
    ("pipeline.stages=0", "greater than zero"),
    ("parallel.ranks=0", "greater than zero"),
    ("clip=flat pipeline.stages=2 pipeline.blocks=[3]", "each of the 2 stages"),
    ("clip=flat pipeline.stages=2 pipeline.blocks=[3,0]", "each of the 2 stages"),
    ("task=sst2 clip=flat pipeline.stages=2", "does not support task=sst2"),
    ("task=samsum_pipeline clip=ghost pipeline.stages=2", "use clip=flat"),
    ("task=samsum_pipeline clip=per_device noise=global pipeline.stages=2", "use noise=equal_budget"),
    ("task=samsum_pipeline clip=fixed_layer noise=weighted pipeline.stages=2", "use noise=equal_budget"),
    ("task=samsum_pipeline clip=adaptive_layer clip.rescale=true pipeline.stages=2", "use clip.rescale=false"),
    ("task=samsum_pipeline clip=adaptive_device clip.rescale=true pipeline.stages=2", "use clip.rescale=false"),
    ("clip=adaptive_device clip.rescale=true", "rescales the only threshold"),
    (
        "task=samsum_pipeline clip=flat clip.grouping=custom +clip.mapping={a:b} pipeline.stages=2",
        "is not supported with pipeline.stages=2",
    ),
    ("task=samsum_pipeline clip=flat pipeline.stages=2 parallel.kind=fsdp", "with pipeline stages"),
    *(
        (f"task=samsum_pipeline clip=flat pipeline.stages=2 {key}", f"{key} cannot be combined with pipeline.stages=2")
        for key in ("train.compile=true", "explain=true", "model.rematerialize=true")
    ),
    ("eval.shots=4 clip=none explain=true", "explain=true cannot be combined with eval.shots"),
    ("clip=flat parallel.ranks=2 parallel.kind=fsdp", "one layer's parameters at a time"),
    ("paths.results=/dev/null", "/dev/null is not a folder"),
    ("export=/dev/null/deeper", "/dev/null is not a folder"),
    ("data.train_file=../../secret.tsv", "is outside the data set's folder"),
    ("data.train_file=/etc/passwd", "is outside the data set's folder"),
    ("data.train_file=a/../../b", "is outside the data set's folder"),
    ("model.source='~nobody-of-this-name/x'", "a user who does not exist"),
    (f"seed={2**63}", "must be at most 1e+15"),
    (f"train.batch_size={10**309}", "must be at most 1e+15"),
    ("optim.weight_decay=1e30", "must be at most 1e+15"),
    ("train.threads=123456789012", "must be at most 1000"),
    ("debug.noise_seed=-1", "zero or more"),
    ("train.keep=[-1]", "numbers of zero or more"),
    ("task=e2e eval.generate.length_penalty=1e6", "must be in [-100, 100]"),
    ("task=e2e eval.generate.length_penalty=nan", "must be in [-100, 100]"),
]


@pytest.mark.parametrize(("overrides", "reason"), REFUSED)
def test_invalid_settings_are_refused_in_one_sentence(overrides: str, reason: str) -> None:
    with pytest.raises(UserError) as refused:
        run(*overrides.split())
    message = str(refused.value)
    assert reason in message
    assert "\n" not in message and len(message) < 400


@pytest.mark.parametrize(
    "overrides",
    [
        "clip.rescale=true noise=weighted",
        "train.precision=bfloat16 train.compile=true",
        "clip=flat clip.rule=automatic",
        "clip=flat privacy.epsilon=inf clip.threshold=1e9",
        "clip=flat clip.grouping=custom +clip.mapping={stem*:early,*:late}",
        "clip=ghost privacy=shuffle",
        "clip.rescale=false clip.initial_threshold=0.01",
        "clip=per_device noise=global",
        "task=samsum_pipeline clip=flat noise=global pipeline.stages=4 parallel.ranks=2",
        "task=samsum_pipeline clip=none pipeline.stages=2 pipeline.blocks=[3,4]",
        "clip=ghost parallel.ranks=2 parallel.kind=fsdp",
    ],
)
def test_unusual_but_valid_settings_are_accepted(overrides: str) -> None:
    run(*overrides.split())
