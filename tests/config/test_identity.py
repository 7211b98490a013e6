"""Configuration hashes, differences, and saved configurations."""

import json
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from groupwise.checkout import CONF
from groupwise.config.compose import compose_run
from groupwise.config.identity import (
    GONE,
    config_hash,
    differences,
    flat_config,
    flatten,
    load_config,
    save_config,
    stable_config,
)
from groupwise.config.schema import (
    ClipConfig,
    DebugConfig,
    ModelConfig,
    NoiseConfig,
    OptimConfig,
    PathsConfig,
    PipelineConfig,
    PrivacyConfig,
    RunConfig,
    TrackerConfig,
    TrainConfig,
)
from groupwise.errors import UserError


@pytest.mark.parametrize(
    "same",
    [
        RunConfig(paths=PathsConfig(data="elsewhere", results="there")),
        RunConfig(tracker=TrackerConfig(name="wandb")),
        RunConfig(resume="somewhere"),
        RunConfig(overwrite=True),
        RunConfig(train=TrainConfig(checkpoint_every=1)),
    ],
)
def test_keys_without_effect_on_the_result_do_not_change_the_hash(same: RunConfig) -> None:
    assert config_hash(same) == config_hash(RunConfig())
    assert differences(same, RunConfig()) == []


def test_whole_number_rate_has_the_same_hash() -> None:
    one, other = (compose_run(["task=cifar", f"optim.learning_rate={rate}"], CONF) for rate in ("2", "2.0"))
    assert config_hash(one) == config_hash(other) and flat_config(one)["optim.learning_rate"] == 2.0


@pytest.mark.parametrize(
    "other",
    [
        RunConfig(seed=1),
        RunConfig(scale="mini"),
        RunConfig(debug=DebugConfig(noise_seed=0)),
        RunConfig(train=TrainConfig(device="cpu")),
        RunConfig(clip=ClipConfig(threshold=2)),
    ],
)
def test_other_keys_change_the_hash(other: RunConfig) -> None:
    assert config_hash(other) != config_hash(RunConfig())


def test_evaluation_batch_size_may_differ_on_resumption() -> None:
    smaller = RunConfig()
    smaller.eval.batch_size, smaller.eval.generate.batch_size = 8, 1
    assert differences(RunConfig(), smaller) == []


def test_newer_key_is_hashed_only_if_it_is_used() -> None:
    secure = RunConfig(noise=NoiseConfig(secure=True))
    assert "noise.secure" not in stable_config(RunConfig()) and stable_config(secure)["noise.secure"] is True
    assert config_hash(secure) != config_hash(RunConfig())
    assert differences(secure, RunConfig()) == ["noise.secure is True there and False here"]
    assert differences(RunConfig(), secure) == ["noise.secure is False there and True here"]


def test_order_of_a_custom_mapping_changes_the_hash() -> None:
    one = RunConfig(clip=ClipConfig(mapping={"stem*": "early", "*": "late"}))
    other = RunConfig(clip=ClipConfig(mapping={"*": "late", "stem*": "early"}))
    assert config_hash(one) != config_hash(other)


def test_saved_configuration_is_loaded_unchanged(tmp_path: Path) -> None:
    config = RunConfig(seed=3, clip=ClipConfig(mapping={"stem*": "early", "*": "late"}))
    config.privacy.epsilon = float("inf")
    (tmp_path / "config.yaml").write_text(save_config(config))
    assert load_config(tmp_path / "config.yaml") == config
    earlier = save_config(config).replace("pipeline:\n", "pipeline:\n  balance: parameters\n")
    (tmp_path / "config.yaml").write_text(earlier)
    assert load_config(tmp_path / "config.yaml") == config
    (tmp_path / "config.yaml").write_text(earlier.replace("balance: parameters", "balance: time"))
    with pytest.raises(UserError, match="is not a run's config"):
        load_config(tmp_path / "config.yaml")


@pytest.mark.parametrize("content", [None, "seed: many", "unknown: 1", "- a list", "seed: [1"])
def test_invalid_configuration_file_is_refused(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "config.yaml"
    if content is not None:
        path.write_text(content)
    with pytest.raises(UserError, match="is not a run's config"):
        load_config(path)


@pytest.mark.parametrize(
    "config",
    [
        RunConfig(),
        RunConfig(train=TrainConfig(keep=[1.0, 2.5], steps=3), optim=OptimConfig(learning_rate=2.0)),
        RunConfig(privacy=PrivacyConfig(epsilon=3.0, noise_multiplier=1.0), pipeline=PipelineConfig(blocks=[1, 2])),
        RunConfig(model=ModelConfig(shape={"n_layer": 2, "rate": 1}), clip=ClipConfig(mapping={"b*": "x", "*": "a"})),
        RunConfig(own_task={"_target_": "a.b", "deep": {"list": [1, None]}}),
    ],
)
def test_flat_configuration_matches_the_typed_one(config: RunConfig) -> None:
    typed = OmegaConf.to_container(OmegaConf.structured(config))
    assert json.dumps(flat_config(config)) == json.dumps(flatten(typed) | GONE)  # as text, 1 and 1.0 differ


def test_flat_row_has_only_plain_values() -> None:
    assert flatten({"a": {"b": 1, "c": {"d": None}}, "e": [1, 2]}) == {"a.b": 1, "a.c.d": None, "e": "[1, 2]"}
    assert all(isinstance(value, str | int | float | None) for value in flat_config(RunConfig()).values())
    json.dumps(flat_config(RunConfig()))
