"""A family's tables: parts by their names, read anew when the file changes, and every mistake in one sentence."""

import os
import shutil
from pathlib import Path

import pytest
from hydra.errors import HydraException

from groupwise.config.compose import compose_run, in_one_sentence
from groupwise.config.tables import Tables
from groupwise.errors import UserError
from tests.combinations import CONF

RECIPE = """
privacy: {delta: 1e-6}
modes:
  flat, ghost:
    optim: {learning_rate: 0.1}
  fixed_layer:
    optim: {learning_rate: 0.2}
"""
TASK = """# @package _global_
defaults:
  - override /family: mine
task: mine
"""
SCALES = """
smoke:
  default_model: wrn
  train: {steps: 4}
  modes:
    ghost: {train: {steps: 5}}
"""


@pytest.fixture
def conf(tmp_path: Path) -> Path:
    """The configuration with a family of its own, that of task=mine."""
    folder = tmp_path / "conf"
    shutil.copytree(CONF, folder, ignore=shutil.ignore_patterns("sweep"))
    (folder / "recipe" / "mine.yaml").write_text(RECIPE)
    (folder / "scales" / "mine.yaml").write_text(SCALES)
    (folder / "task" / "mine.yaml").write_text(TASK)
    return folder


@pytest.mark.parametrize(("clip", "rate", "steps"), [("flat", 0.1, 4), ("ghost", 0.1, 5), ("fixed_layer", 0.2, 4)])
def test_a_mode_gets_its_row_and_a_scale_its_exceptions(conf: Path, clip: str, rate: float, steps: int) -> None:
    config = compose_run(["task=mine", f"clip={clip}", "scale=smoke"], conf)
    assert (config.privacy.delta, config.optim.learning_rate, config.train.steps) == (1e-6, rate, steps)
    assert (config.model.name, config.scale) == ("wide_resnet", "smoke")


def test_choices_and_the_command_line_win_over_tables(conf: Path) -> None:
    config = compose_run(["task=mine", "clip=flat", "scale=smoke", "optim=adam", "train.steps=7"], conf)
    assert (config.optim.learning_rate, config.train.steps) == (1e-3, 7)
    (conf / "recipe" / "mine.yaml").write_text(RECIPE + "    train: {steps: 3}\n")
    assert compose_run(["task=mine", "clip=fixed_layer", "scale=smoke"], conf).train.steps == 4


def test_a_changed_file_is_read_again(conf: Path) -> None:
    tables = Tables(conf)
    file = conf / "recipe" / "mine.yaml"
    before = tables.part("recipe/mine/flat")
    file.write_text(RECIPE.replace("0.1", "0.3"))
    os.utime(file, ns=(0, 0))  # however coarse the clock of the file system
    after = tables.part("recipe/mine/flat")
    assert before and after and before.values != after.values == {"optim": {"learning_rate": 0.3}}


def test_parts_are_listed_by_group(conf: Path) -> None:
    tables = Tables(conf)
    assert "mine" in tables.parts("family")
    assert tables.parts("recipe/mine") == ["fixed_layer", "flat", "ghost"]
    assert tables.parts("scales/mine") == tables.parts("model/default/mine") == ["smoke"]
    assert tables.parts("exceptions/mine/smoke") == ["ghost"]
    for none in ("recipe", "recipe/yours", "recipe/mine/flat", "exceptions/mine/mini", "clip", ""):
        assert tables.parts(none) == []
    for none in ("recipe/mine/none", "recipe/yours/flat", "scales/mine/mini", "clip/flat", "model/default/mine/mini"):
        assert tables.part(none) is None


@pytest.mark.parametrize(
    ("folder", "old", "new", "sentence"),
    [
        ("recipe", "flat, ghost", "flat, gost", "recipe/mine.yaml:4: gost is no clipping mode"),
        ("recipe", "flat, ghost", "flat, gost", "did you mean ghost?"),
        ("recipe", "fixed_layer", "ghost", "recipe/mine.yaml:6: ghost has two rows"),
        (
            "recipe",
            "learning_rate: 0.2",
            "learning_rat: 0.2",
            "mine.yaml:7: there is no key optim.learning_rat (did you",
        ),
        ("recipe", "{delta: 1e-6}", "{delta: 1e-6, delta: 1e-5}", "mine.yaml cannot be read (while constructing"),
        ("recipe", "privacy:", "privcy:", "mine.yaml:2: there is no key privcy (did you mean privacy?)"),
        ("recipe", "modes:", "modus:", "mine.yaml:3: there is no key modus"),
        ("recipe", "{learning_rate: 0.2}", "", "the section optim holds None, where its keys were expected"),
        (
            "recipe",
            "    optim: {learning_rate: 0.2}",
            "",
            "mine.yaml:6: fixed_layer is None, where settings were expected",
        ),
        ("scales", "smoke:", "smok:", "scales/mine.yaml:2: smok is no scale"),
        ("scales", "{train: {steps: 5}}", "{train: {step: 5}}", "mine.yaml:6: there is no key train.step"),
        ("scales", "  default_model: wrn\n", "", "scales/mine.yaml holds what does, each with its default_model"),
        ("scales", "smoke:", "mini:", "scale=smoke does not go with this task: conf/scales/mine.yaml holds what does"),
        ("task", "mine\ntask", "mien\ntask", "family=mien is not one of"),
        ("scales", "{train: {steps: 5}}", "5", "mine.yaml:6: ghost is 5, where settings were expected"),
        ("scales", "default_model: wrn", "default_model: wrm", "mine.yaml:3: wrm is no model"),
    ],
)
def test_a_mistake_in_a_table_is_one_sentence_with_its_line(
    conf: Path, folder: str, old: str, new: str, sentence: str
) -> None:
    file = conf / folder / "mine.yaml"
    file.write_text(file.read_text().replace(old, new))
    with pytest.raises((UserError, HydraException)) as told:
        compose_run(["task=mine", "clip=fixed_layer", "scale=smoke"], conf)
    assert sentence in in_one_sentence(told.value)
