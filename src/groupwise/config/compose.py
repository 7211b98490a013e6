"""Composes a run's configuration with Hydra, and checks it against the schema."""

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

from groupwise.config.checks import refuse_unused, validate
from groupwise.config.keys import FREE, key_types
from groupwise.config.resolvers import register_resolvers
from groupwise.config.schema import Command, PrivacyConfig, RunConfig
from groupwise.config.sentences import in_one_sentence, unknown_key
from groupwise.errors import UserError
from groupwise.rows import SCALES


@functools.cache
def register() -> None:
    """Register the schema, the scales and the resolvers of `conf/` with Hydra, once in each process."""
    store = ConfigStore.instance()
    store.store(name="schema", node=Command)
    for scale in SCALES:
        store.store(group="scale", name=scale, node={"scale": scale}, package="_global_")
    register_resolvers()


def compose_run(overrides: Sequence[str], conf: Path, *, typed: bool = True) -> RunConfig:
    """Compose one run from the folder ``conf`` without a command line, for tests and notebooks.

    Raises :class:`UserError` as :func:`to_run_config` does, and if an override that a user ``typed`` has no effect; one
    of a sweep's file may have none.
    """
    register()
    with initialize_config_dir(str(conf.resolve()), version_base="1.3"):
        config = to_run_config(compositions_of(conf).compose(overrides))
    if typed:
        refuse_unused(overrides, config)
    return config


def refuse_taken_names(folder: Path, conf: Path) -> None:
    """Raise a `UserError` if a file of a user's folder has the name of a file in ``conf``, which Hydra would prefer."""
    for file in sorted([*conf.glob("*/*.yaml"), *conf.glob("*/*/*.yaml")]):
        refuse_taken_name(folder / file.relative_to(conf), file)


def refuse_taken_name(own: Path, file: Path) -> None:
    """Raise a `UserError` if both files exist and are not the same."""
    if own.is_file() and file.is_file() and not own.samefile(file):
        what = f"{own.stem} is also the name of a {file.parent.name} of the package"
        raise UserError(f"{own} cannot be used, since {what}: give the file another name.")


def compositions_of(conf: Path) -> "Compositions":
    """Return the `Compositions` of a folder, new ones if a file has changed."""
    conf = conf.resolve()
    return _compositions(conf, max((path.stat().st_mtime_ns for path in conf.rglob("*.yaml")), default=0))


@functools.lru_cache(maxsize=8)
def _compositions(_conf: Path, _written: int) -> "Compositions":
    return Compositions()


class Compositions:
    """Calls `hydra.compose` once for all overrides that choose the same files, inside `initialize_config_dir`.

    A composition takes a tenth of a second, and a sweep has hundreds. `places` are overrides of ``hydra.searchpath``.
    """

    def __init__(self, places: Sequence[str] = ()) -> None:
        self._places = places
        self._composed: dict[tuple[str, ...], DictConfig] = {}

    def compose(self, overrides: Sequence[str]) -> DictConfig:
        """Return the configuration of `overrides`; raises Hydra's exceptions."""
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
            return compose("config", [*self._places, *overrides])  # raises an error that names the override
        return config


def parse(overrides: Sequence[str]) -> list[Override]:
    """Parse a command line as Hydra does. Call this inside `initialize_config_dir`, which ``glob(*)`` needs."""
    loader = GlobalHydra.instance().config_loader()
    return OverridesParser.create(config_loader=loader).parse_overrides(list(overrides))


def _is_value(item: Override) -> bool:
    """Whether it is ``key=value`` for a key of a section, which does not affect the choice of files."""
    kind = key_types().get(item.key_or_group)
    plain = item.type == OverrideType.CHANGE and item.package is None and not item.is_sweep_override()
    return plain and kind is not None and not is_dataclass(kind) and item.key_or_group not in ("task", "scale")


def to_run_config(composed: DictConfig) -> RunConfig:
    """Convert a composed configuration to a validated `RunConfig`, with all interpolations resolved.

    Raises:
        UserError: a key that is not in the schema, a value that cannot be resolved, or an error of `validate`.
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
    assert isinstance(command, Command), "conf/config.yaml must begin with the schema"
    config = RunConfig(**{item.name: getattr(command, item.name) for item in fields(RunConfig)})
    if config.privacy.noise_multiplier is not None and config.privacy.epsilon in (PrivacyConfig.epsilon, math.inf):
        config.privacy.epsilon = None  # the default: ε is computed from the noise, once the data are known
    validate(config)
    return config


def _keys(node: DictConfig, prefix: str = "") -> Iterator[str]:
    # "+clip.foo=1" passes Hydra's check of keys, and nothing would read the key.
    for name in node:
        key = prefix + str(name)
        yield key
        child = node._get_node(name)
        if isinstance(child, DictConfig) and not child._is_none():
            yield from _keys(child, f"{key}.")
