"""Composes a run's configuration by Hydra against the schema, and types the result."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra import compose
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from groupwise.config.checks import validate, value_at
from groupwise.config.keys import FREE_KEYS, expected, fits, key_types
from groupwise.config.mistakes import in_one_sentence, unknown_key
from groupwise.config.schema import RunConfig
from groupwise.config.tables import Tables
from groupwise.errors import UserError


def register() -> None:
    """Give Hydra the schema, first in `conf/config.yaml`, and the resolvers that recipes use; repeatable."""
    from hydra.core.config_store import ConfigStore

    ConfigStore.instance().store(name="schema", node=RunConfig)
    OmegaConf.register_new_resolver("at_epsilon", _at_epsilon, replace=True)
    OmegaConf.register_new_resolver("at", _at, replace=True)
    OmegaConf.register_new_resolver("joint", _joint, replace=True)


def _at_epsilon(table: dict[float, Any], *, _root_: DictConfig) -> Any:
    return at_epsilon(table, _root_.privacy.epsilon)


def _at(name: str, table: dict[str, Any]) -> Any:
    """``${at:${model.name},{roberta_large:512,other:1024}}``: the entry of that name, else that of ``other``."""
    if name not in table and "other" not in table:
        raise UserError(f"{name} is not one of {', '.join(table)}: give the value that depends on it yourself.")
    return table.get(name, table.get("other"))


def _joint(threshold: float, groups: int) -> float:
    """``${joint:1e-5,${pipeline.stages}}``: C of so many groups that each clip to that threshold."""
    return threshold * math.sqrt(groups) if groups > 0 else threshold


def to_run_config(composed: DictConfig) -> RunConfig:
    """The composed config as a validated `RunConfig`: every interpolation resolved, every type checked.

    Raises `UserError`: a key that the schema lacks, a value that cannot be worked out, what `validate`
    refuses.
    """
    known = key_types()
    for key in _keys(composed):
        if key not in known and not key.startswith(FREE_KEYS):
            raise UserError(unknown_key(key))
    try:
        with warnings.catch_warnings(action="ignore"):  # ${oc.deprecated:key} would have a word to say
            config = OmegaConf.to_object(composed)
    except OmegaConfBaseException as error:
        raise UserError(in_one_sentence(error)) from error
    if not isinstance(config, RunConfig):
        raise TypeError(f"conf/config.yaml must begin with the schema; it composed a {type(config).__name__}")
    for key, kind in known.items():
        if not fits(value_at(config, key), kind):
            raise UserError(f"{key}={value_at(config, key)} does not fit: {expected(key)} was expected.")
    if config.privacy.noise_multiplier is not None:
        config.privacy.epsilon = None  # it follows from the noise, once the data are known
    validate(config)
    return config


def _keys(node: DictConfig, prefix: str = "") -> Iterator[str]:
    # "+clip.foo=1" slips a key past Hydra's struct check, and the dataclass would carry it along unread.
    for name in map(str, node):
        yield prefix + name
        child = node._get_node(name)
        if isinstance(child, DictConfig) and not child._is_none():
            yield from _keys(child, f"{prefix}{name}.")


def compose_run(overrides: list[str], conf: Path) -> RunConfig:
    """Compose one run outside of the command line, from the folder ``conf``: for tests and notebooks."""
    from hydra import compose, initialize_config_dir

    register()
    with initialize_config_dir(str(conf.resolve()), version_base="1.3"):
        return to_run_config(compose("config", overrides))


class Composer:
    """Composes as `hydra.compose` does inside of `initialize_config_dir`; what differs in plain values is a copy."""

    def __init__(self, conf: Path) -> None:
        self._conf = conf
        self._tables = Tables(conf)
        self._parser = OverridesParser.create()
        self._chosen: dict[tuple[str, ...], DictConfig] = {}

    def compose(self, overrides: Sequence[str]) -> DictConfig:
        """The configuration of `overrides`; raises what Hydra raises."""
        given = self._parser.parse_overrides(list(overrides))
        options = [item for item in given if self._chooses(item)]
        key = tuple(str(item.input_line) for item in options)
        if key not in self._chosen:
            self._chosen[key] = compose("config", list(key))
        composed = copy.deepcopy(self._chosen[key])
        ConfigLoaderImpl._apply_overrides_to_config([item for item in given if item not in options], composed)
        return composed

    def _chooses(self, item: Override) -> bool:
        group = item.key_or_group
        chosen = (self._conf / group).is_dir() or bool(self._tables.parts(group))
        return chosen or item.package is not None or item.is_hydra_override()


def at_epsilon(table: Mapping[float, Any], epsilon: float | None) -> Any:
    """The entry of ``table`` at ``epsilon``, else at the epsilon nearest in ratio, ties to the smaller.

    Without noise (inf) it is the entry of the largest one, which may be inf itself; where the noise multiplier is given
    instead (None), that of the largest finite one. Raises `UserError` for an epsilon that is not positive.
    """
    known = sorted(table)
    if epsilon == math.inf:
        return table[known[-1]]
    if epsilon is None:
        return table[max((entry for entry in known if entry < math.inf), default=math.inf)]
    if not epsilon > 0:
        raise UserError(f"privacy.epsilon={epsilon:g} must be greater than zero.")
    return table[min(known, key=lambda entry: abs(math.log(entry / epsilon)))]
