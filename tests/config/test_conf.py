"""Every value in a file of `conf/` appears in some composed configuration."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from groupwise.config.compose import register
from tests.combinations import CELLS, CONF, OPTIONS, pairwise

FILES = sorted(
    file for file in CONF.rglob("*.yaml") if file.relative_to(CONF).parts[0] not in ("sweep", "hydra", "experiment")
)


def leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Each dotted key with its value as text; whole numbers as floats."""
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", repr(float(value)) if type(value) is int else repr(value)


def values_of(file: Path) -> set[tuple[str, str]]:
    group, text = file.relative_to(CONF).parts[0], file.read_text()
    values = OmegaConf.to_container(OmegaConf.load(file))
    values = {key: value for key, value in values.items() if key not in ("defaults", "hydra")}
    return set(leaves(values if "@package _global_" in text or file.parent == CONF else {group: values}))


@pytest.mark.slow
def test_every_value_of_a_file_appears_in_some_configuration() -> None:
    register()
    cells = [[f"{key}={value}" for key, value in zip(("task", "clip", "scale"), cell, strict=True)]
             for cell in pairwise(CELLS)]  # fmt: skip
    single = [[f"{group}={option}"] for group in ("model", "privacy", "optim", "noise", "tracker")
              for option in OPTIONS[group]]  # fmt: skip
    own = [["recipe=own", "scale=paper"], ["recipe=own", "scale=smoke"]]
    unused = {(file.name, *leaf) for file in FILES for leaf in values_of(file)}
    with initialize_config_dir(str(CONF), version_base="1.3"):
        for overrides in (*single, *own, *cells):
            composed = set(leaves(OmegaConf.to_container(compose("config", overrides))))
            unused = {item for item in unused if item[1:] not in composed}
    assert unused == set()


@pytest.mark.parametrize("file", [file for file in FILES if file.parent.name != "own"], ids=lambda file: file.stem)
def test_every_file_sets_a_value(file: Path) -> None:
    assert values_of(file)
