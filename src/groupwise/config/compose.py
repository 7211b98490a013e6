"""Composes a run's configuration by Hydra against the schema, types it, and says in one sentence what was wrong."""

from __future__ import annotations

import copy
import errno
import functools
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import CachingConfigRepository, IConfigRepository
from hydra._internal.defaults_list import DefaultsList, create_defaults_list
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import ConfigCompositionException, HydraException, MissingConfigException, OverrideParseException
from hydra.plugins.config_source import ConfigResult
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import (
    ConfigAttributeError,
    ConfigKeyError,
    InterpolationResolutionError,
    MissingMandatoryValue,
    OmegaConfBaseException,
    ValidationError,
)

from groupwise.config.checks import validate, value_at
from groupwise.config.idle import refuse_idle
from groupwise.config.keys import FREE_KEYS, expected, fits, key_types, roots
from groupwise.config.names import OURS
from groupwise.config.schema import PrivacyConfig, RunConfig
from groupwise.config.tables import Tables
from groupwise.errors import UserError, did_you_mean, message

DERIVED = {"recipe": "clip", "scales": "scale", "model/default": "scale"}
"""Parts of a family's tables (`groupwise.config.tables`), and the choice that they follow from."""

COMPOSITION_ERRORS = (UserError, HydraException, OmegaConfBaseException, RecursionError)
"""What composing raises for a mistake; the last for values in a circle."""


def too_long(error: BaseException) -> bool:
    """Whether it is a key or an option that is longer than a file's name can be: Hydra looks for such a file."""
    return isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG


def unknown_key(key: str, groups: tuple[str, ...] = ()) -> str:
    """The sentence for a key that the schema lacks, with the key that was probably meant."""
    if key.startswith("clip.mapping."):
        return "clip.mapping has no entries yet, and new ones take a plus: '+clip.mapping={stem*:early,*:late}'."
    if key.startswith("model.shape."):
        return "model.shape has no entries yet, and new ones take a plus: '+model.shape={n_layer:2}'."
    if key.startswith("own_task."):
        return "own_task has no entries yet, and new ones take a plus: '+own_task._target_=module.function'."
    known = key_types()
    section, _, last = key.rpartition(".")
    same_end = [name for name in known if name.rpartition(".")[2] in (last, OURS.get(last))]
    if same_end:
        hint = f" (did you mean {' or '.join(same_end)}?)"
    elif section in known:
        ends = {name.rpartition(".")[2]: name for name in known if name.startswith(f"{section}.")}
        hint = did_you_mean(last, ends, ends)
    else:
        hint = did_you_mean(key, [*known, *groups])
    return f"there is no key or group {key}{hint}; `python run.py --help` lists them."


def in_one_sentence(error: BaseException, groups: tuple[str, ...] = ()) -> str:
    """``error``, one of `COMPOSITION_ERRORS` or `too_long`, as one sentence; ``groups`` may be what was misspelt."""
    return message(UserError(_sentence(error, groups)))


def _sentence(error: BaseException, groups: tuple[str, ...]) -> str:
    cause = error.__cause__ if isinstance(error.__cause__, OmegaConfBaseException) else error
    key = str(getattr(cause, "full_key", None) or "")
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, OverflowError):
        key = next(iter(str(error).partition("full_key: ")[2].split()), "a key")  # OmegaConf tells it in the text alone
        return f"{key} takes no number that large."
    if too_long(error):
        return "an argument begins with more characters than any key has, or chooses an option of such a name."
    if isinstance(error, RecursionError):
        return "the configuration refers to itself: write the value out."
    if isinstance(error, MissingConfigException):
        return _missing_config(error)
    if isinstance(error, OverrideParseException):
        reason = _first_line(error.message, skip="Error parsing")
        if reason.startswith("Lexer"):
            reason = "put a value with such characters into quotes, '" + '"..."' + "' with the shell's around them"
        return f"'{error.override}' cannot be read as key=value: {reason}."
    if isinstance(cause, (ConfigAttributeError, ConfigKeyError)) and key:
        return unknown_key(key, groups)
    if isinstance(cause, ValidationError) and key:
        return f"{_given(error, key)} does not fit: {expected(key)} was expected."
    if isinstance(cause, MissingMandatoryValue) and key:
        return f"{key} has no value: {expected(key)} was expected."
    if isinstance(cause, InterpolationResolutionError) and key:
        return f"{key} cannot be worked out: {_first_line(str(cause))}."
    if "add --multirun" in str(error):
        override = _first_line(str(error)).removeprefix("Ambiguous value for argument ")
        return f"{override} gives several values: add -m to run them all."
    return f"{_first_line(str(error))}."


def _missing_config(error: MissingConfigException) -> str:
    group, _, option = (error.missing_cfg_file or "").rpartition("/")
    folder, _, family = group.rpartition("/")
    if folder in DERIVED:
        table = "recipe" if folder == "recipe" else "scales"
        named = ", each with its default_model" if folder == "model/default" else ""
        return (
            f"{DERIVED[folder]}={option} does not go with this task: conf/{table}/{family}.yaml holds what does{named}."
        )
    if not error.options:
        return f"conf/{error.missing_cfg_file}.yaml does not exist: a file of that name is needed."
    return f"{group}={option} is not one of {', '.join(error.options)}{did_you_mean(option, error.options)}."


def _given(error: BaseException, key: str) -> str:
    """The override as it was typed, where Hydra tells it, else the key alone."""
    start = "Error merging override "
    return str(error).removeprefix(start) if str(error).startswith(start) else key


def _first_line(message: str | None, skip: str = "\0") -> str:
    lines = [line.strip() for line in (message or "").splitlines()]
    told = [line for line in lines if line and not line.startswith(skip)]
    return told[0].rstrip(".:") if told else "no reason was given"


def register() -> None:
    """Give Hydra the schema, first in `conf/config.yaml`, and the resolvers that recipes use; repeatable."""
    from hydra.core.config_store import ConfigStore

    store = ConfigStore.instance()
    if "schema.yaml" not in store.repo:  # reading the schema off its dataclasses takes a seventh of a composition
        store.store(name="schema", node=RunConfig)
        vars(store)["__deepcopy__"] = lambda memo: store  # Hydra copies it for each, and then what it takes from it
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
    if config.privacy.noise_multiplier is not None and config.privacy.epsilon in (PrivacyConfig.epsilon, math.inf):
        config.privacy.epsilon = None  # nobody asked for it: it follows from the noise, once the data are known
    validate(config)
    return config


def check_typed(overrides: Sequence[str]) -> None:
    """Refuse words on a command line that are no ``key=value``, and a key that is given twice.

    Raises:
        UserError: naming one.
    """
    given: dict[str, str] = {}
    for place, override in enumerate(overrides):
        key, equals, _ = override.lstrip("+").partition("=")
        if not equals and not key.startswith("~"):
            follows = "".join(overrides[place + 1 : place + 2])
            shown = f"{key}={follows}" if follows and "=" not in follows else "clip=flat"
            raise UserError(f"'{override}' cannot be read as key=value: write it in one word, such as {shown}.")
        if key in given and not key.startswith("hydra"):
            raise UserError(f"{given[key]} and {override} are both given: leave one out.")
        given[key] = override
    refuse_both(overrides)


def refuse_both(overrides: Sequence[str]) -> None:
    """Refuse ε and σ side by side on a command line; where σ alone is given, it takes the place of a recipe's ε.

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


def _keys(node: DictConfig, prefix: str = "") -> Iterator[str]:
    # "+clip.foo=1" slips a key past Hydra's struct check, and the dataclass would carry it along unread.
    for name in map(str, node):
        yield prefix + name
        child = node._get_node(name)
        if isinstance(child, DictConfig) and not child._is_none():
            yield from _keys(child, f"{prefix}{name}.")


def compose_run(overrides: list[str], conf: Path, *, typed: bool = True) -> RunConfig:
    """Compose one run outside of the command line, from the folder ``conf``: for tests and notebooks.

    Args:
        typed: whether a person gave the overrides, who is told what changes nothing; the file of a sweep may hold that.
    """
    register()
    refuse_both(overrides)
    with initialize_config_dir(str(conf.resolve()), version_base="1.3"):
        config = to_run_config(composer_of(conf).compose(overrides))
    if typed:
        refuse_idle(overrides, config)
    return config


def composer_of(conf: Path) -> Composer:
    """Of the folder as it was last written: options that were chosen once are not composed again.

    Where there is a folder of the user's own beside it, a new one: that may be too large to look through for changes.
    """
    if len(roots(conf)) > 1:
        return Composer(conf)
    conf = conf.resolve()
    return _composer(conf, max((path.stat().st_mtime_ns for path in conf.rglob("*.yaml")), default=0))


@functools.lru_cache(maxsize=8)
def _composer(conf: Path, _written: int) -> Composer:
    return Composer(conf)


class Composer:
    """Composes as `hydra.compose` does inside of `initialize_config_dir`, in a third of its time.

    Every file is read once, Hydra's own settings are left out, and what differs in plain values is a copy.
    """

    def __init__(self, conf: Path) -> None:
        self._conf = conf
        self._tables = Tables(conf)
        self._parser = OverridesParser.create()
        self._loaded: dict[str, ConfigResult | None] = {}
        self._chosen: dict[tuple[str, ...], DictConfig] = {}

    def compose(self, overrides: Sequence[str]) -> DictConfig:
        """The configuration of `overrides`; raises what Hydra raises."""
        given = self._parser.parse_overrides(list(overrides))
        options = [item for item in given if self._chooses(item)]
        key = tuple(str(item.input_line) for item in options)
        if key not in self._chosen:
            hydras = any(item.is_hydra_override() for item in options)
            self._chosen[key] = compose("config", list(key)) if hydras else self._choose(options)
        composed = copy.deepcopy(self._chosen[key])
        ConfigLoaderImpl._apply_overrides_to_config([item for item in given if item not in options], composed)
        return composed

    def defaults(self, overrides: Sequence[str]) -> DefaultsList:
        """Which files `overrides` compose, in their order, and the values that they write; of Hydra's own, nothing."""
        given = self._parser.parse_overrides(list(overrides))
        return self._listed([item for item in given if not item.is_hydra_override()])[2]

    def _choose(self, options: list[Override]) -> DictConfig:
        """`hydra.compose`, but for `_OurFiles`."""
        loader, files, listed = self._listed(options)
        try:
            composed = loader._compose_config_from_defaults_list(listed.defaults, files)
            OmegaConf.set_struct(composed, True)
            ConfigLoaderImpl._apply_overrides_to_config(listed.config_overrides, composed)
        except OmegaConfBaseException as error:
            raise ConfigCompositionException() from error
        return composed

    def _listed(self, given: list[Override]) -> tuple[ConfigLoaderImpl, IConfigRepository, DefaultsList]:
        loader = GlobalHydra.instance().config_loader()
        assert isinstance(loader, ConfigLoaderImpl)
        files = _OurFiles(loader.repository, self._loaded)
        listed = create_defaults_list(files, "config", given, prepend_hydra=False, skip_missing=False)
        return loader, files, listed

    def _chooses(self, item: Override) -> bool:
        group = item.key_or_group
        chosen = (self._conf / group).is_dir() or bool(self._tables.parts(group))
        return chosen or item.package is not None or item.is_hydra_override()


class _OurFiles(CachingConfigRepository):
    """Loads a file once for all compositions, without what it says of Hydra's own settings."""

    def __init__(self, files: IConfigRepository, loaded: dict[str, ConfigResult | None]) -> None:
        super().__init__(files)
        self._loaded = loaded

    def load_config(self, config_path: str) -> ConfigResult | None:
        if config_path not in self.cache:
            if config_path not in self._loaded:
                self._loaded[config_path] = _without_hydra(self.delegate.load_config(config_path))
            self.cache[config_path] = copy.deepcopy(self._loaded[config_path])
        return self.cache[config_path]


def _without_hydra(file: ConfigResult | None) -> ConfigResult | None:
    if file is None:
        return None
    if isinstance(file.config, DictConfig) and "hydra" in file.config:
        del file.config["hydra"]
    chosen = [(item, str(getattr(item, "group", ""))) for item in file.defaults_list or []]
    file.defaults_list = [item for item, group in chosen if not group.lstrip("/").startswith("hydra/")]
    return file


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
