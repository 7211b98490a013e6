"""Composes a run's configuration by Hydra against the schema, and checks it."""

from __future__ import annotations

import copy
import functools
import math
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from groupwise.config.checks import refuse_unused, validate, value_at
from groupwise.config.keys import FREE, expected, fits, key_types
from groupwise.config.resolvers import register_resolvers
from groupwise.config.schema import Command, PrivacyConfig, RunConfig
from groupwise.config.sentences import in_one_sentence, unknown_key
from groupwise.errors import UserError
from groupwise.rows import SCALES


@functools.cache
def register() -> None:
    """Give Hydra the schema, the scales and the resolvers of `conf/`, once in each process."""
    store = ConfigStore.instance()
    store.store(name="schema", node=Command)
    for scale in SCALES:
        store.store(group="scale", name=scale, node={"scale": scale}, package="_global_")
    register_resolvers()


def compose_run(overrides: Sequence[str], conf: Path, *, typed: bool = True) -> RunConfig:
    """Compose one run outside of the command line, from the folder ``conf``: for tests and notebooks.

    Args:
        typed: whether a person gave the overrides: then settings without effect are refused, which a sweep's file may
            have.
    """
    register()
    refuse_both(overrides)
    with initialize_config_dir(str(conf.resolve()), version_base="1.3"):
        config = to_run_config(compositions_of(conf).compose(overrides))
    if typed:
        refuse_unused(overrides, config)
    return config


def compositions_of(conf: Path) -> Compositions:
    """The compositions of the folder in its current state."""
    conf = conf.resolve()
    return _compositions(conf, max((path.stat().st_mtime_ns for path in conf.rglob("*.yaml")), default=0))


@functools.lru_cache(maxsize=8)
def _compositions(_conf: Path, _written: int) -> Compositions:
    return Compositions()


class Compositions:
    """`hydra.compose` inside `initialize_config_dir`, once for all overrides that differ in plain values alone: a
    composition takes a tenth of a second, and a sweep has hundreds.

    Args:
        places: overrides of ``hydra.searchpath``, which all compositions share.
    """

    def __init__(self, places: Sequence[str] = ()) -> None:
        self._places = places
        self._composed: dict[tuple[str, ...], DictConfig] = {}

    def compose(self, overrides: Sequence[str]) -> DictConfig:
        """The configuration of `overrides`; Hydra's exceptions pass through."""
        given = parse(overrides)
        values = [item for item in given if _is_value(item)]
        choices = tuple(str(item.input_line) for item in given if item not in values)
        if choices not in self._composed:
            self._composed[choices] = compose("config", [*self._places, *choices])
        config = copy.deepcopy(self._composed[choices])
        try:
            for item in values:
                OmegaConf.update(config, item.key_or_group, item.value(), merge=True)
        except OmegaConfBaseException:
            return compose("config", [*self._places, *overrides])  # which fails too, and names the override
        return config


def parse(overrides: Sequence[str]) -> list[Override]:
    """A command line as Hydra parses it, inside `initialize_config_dir`, where ``glob(*)`` looks."""
    loader = GlobalHydra.instance().config_loader()
    return OverridesParser.create(config_loader=loader).parse_overrides(list(overrides))


def _is_value(item: Override) -> bool:
    """Whether it is ``key=value`` for a key of a section, which does not affect the choice of files."""
    kind = key_types().get(item.key_or_group)
    plain = item.type == OverrideType.CHANGE and item.package is None and not item.is_sweep_override()
    return plain and kind is not None and not is_dataclass(kind) and item.key_or_group not in ("task", "scale")


def to_run_config(composed: DictConfig) -> RunConfig:
    """The composed config as a validated `RunConfig`: every interpolation resolved, every type checked.

    Raises:
        UserError: a key that the schema lacks, a value that cannot be resolved, or what `validate` refuses.
    """
    free = tuple(f"{name}." for name in (*FREE, "sweep"))
    for key in _keys(composed):
        if key not in key_types(Command) and not key.startswith(free):
            raise UserError(unknown_key(key))
    try:
        with warnings.catch_warnings(action="ignore"):  # ${oc.deprecated:key} would warn
            command = OmegaConf.to_object(composed)
    except OmegaConfBaseException as error:
        raise UserError(in_one_sentence(error)) from error
    if not isinstance(command, Command):
        raise TypeError(f"conf/config.yaml must begin with the schema; it composed a {type(command).__name__}")
    config = RunConfig(**{item.name: getattr(command, item.name) for item in fields(RunConfig)})
    for key, kind in key_types().items():
        if not fits(value_at(config, key), kind):
            raise UserError(f"{key}={value_at(config, key)} does not fit: {expected(key)} was expected.")
    if config.privacy.noise_multiplier is not None and config.privacy.epsilon in (PrivacyConfig.epsilon, math.inf):
        config.privacy.epsilon = None  # not given: it follows from the noise, once the data are known
    validate(config)
    return config


def _keys(node: DictConfig, prefix: str = "") -> Iterator[str]:
    # "+clip.foo=1" slips a key past Hydra's struct check, and the dataclass would carry it along unread.
    for name in node:
        key = prefix + str(name)
        yield key
        child = node._get_node(name)
        if isinstance(child, DictConfig) and not child._is_none():
            yield from _keys(child, f"{key}.")


def refuse_both(overrides: Sequence[str]) -> None:
    """Refuse ε and σ together on a command line; σ alone replaces a recipe's ε.

    Raises:
        UserError: both were given, neither as null.
    """
    given = {key.lstrip("+"): value for key, _, value in (override.partition("=") for override in overrides)}
    both = [given.get(key, "null") for key in ("privacy.epsilon", "privacy.noise_multiplier")]
    if "null" not in both:
        raise UserError(
            f"privacy.epsilon={both[0]} and privacy.noise_multiplier={both[1]} are both given: give one, as the other "
            "follows from it."
        )
