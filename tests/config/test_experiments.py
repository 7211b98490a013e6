"""Each file of conf/experiment/ has the configuration hash of the cell of the paper that it is named after."""

from pathlib import Path

import pytest
from hydra.errors import ConfigCompositionException

from groupwise.config.compose import compose_run
from groupwise.config.identity import config_hash
from groupwise.config.sentences import in_one_sentence

CONF = Path(__file__).parents[2] / "conf"
CELLS = {
    "cifar": "task=cifar clip=adaptive_layer",
    "dart": "task=dart model=gpt2 clip=adaptive_layer",
    "e2e": "task=e2e model=gpt2 clip=adaptive_layer",
    "mnli_large": "task=mnli model=roberta_large clip=adaptive_layer",
    "samsum": "task=samsum model=gpt2_xl clip=flat privacy.epsilon=1",
    "samsum_pipeline": "task=samsum_pipeline model=opt_175b clip=per_device privacy.epsilon=1",
    "sst2": "task=sst2 clip=adaptive_layer",
    "sst2_three_epochs": "task=sst2 model.trains=attention clip=adaptive_layer train.epochs=3 privacy.epsilon=3",
}


def test_every_experiment_file_is_listed() -> None:
    assert sorted(CELLS) == sorted(file.stem for file in (CONF / "experiment").glob("*.yaml"))


@pytest.mark.parametrize("name", CELLS)
def test_experiment_has_the_hash_of_its_cell(name: str) -> None:
    found = compose_run([f"+experiment={name}"], CONF)
    assert config_hash(found) == config_hash(compose_run(CELLS[name].split(), CONF))


def test_command_line_overrides_the_experiment() -> None:
    found = compose_run(["+experiment=e2e", "privacy.epsilon=3", "clip=flat", "seed=2"], CONF)
    assert config_hash(found) == config_hash(
        compose_run(["task=e2e", "clip=flat", "privacy.epsilon=3", "seed=2"], CONF)
    )


def test_missing_plus_is_explained() -> None:
    with pytest.raises(ConfigCompositionException) as error:
        compose_run(["experiment=cifar"], CONF)
    assert in_one_sentence(error.value).endswith("To append to your default list use +experiment=cifar")
