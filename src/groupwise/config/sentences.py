"""Turns the errors of Hydra and OmegaConf into one sentence."""

from __future__ import annotations

from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf.errors import (
    ConfigAttributeError,
    ConfigKeyError,
    InterpolationResolutionError,
    OmegaConfBaseException,
    ValidationError,
)

from groupwise.config.keys import FREE, OURS, expected, key_types
from groupwise.errors import UserError, did_you_mean, message

COMPOSITION_ERRORS = (UserError, HydraException, OmegaConfBaseException, RecursionError)
"""Exceptions for mistakes during composition; the last one for circular values."""
MERGING = "Error merging override "
"""The beginning of Hydra's message for a value that does not fit its key; the override follows."""
OWN_ERROR = "UserError raised while resolving interpolation: "
"""The beginning of OmegaConf's message for a `UserError` of a resolver."""


def unknown_key(key: str, groups: tuple[str, ...] = ()) -> str:
    """The sentence for a key that the schema lacks, with the key that was probably meant."""
    for mapping, example in FREE.items():
        if key.startswith(f"{mapping}."):
            return f"{key} is no entry of {mapping} here; new ones take a plus: {example}."
    if key.startswith("hydra.launcher."):
        return f"there is no key {key}; `hydra/launcher=slurm --cfg hydra -p hydra.launcher` lists those of a launcher."
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
    """An error of composition as one sentence; it may suggest one of ``groups``."""
    return message(UserError(_sentence(error, groups)))


def _sentence(error: BaseException, groups: tuple[str, ...]) -> str:
    cause = error.__cause__ if isinstance(error.__cause__, OmegaConfBaseException) else error
    key = str(getattr(cause, "full_key", None) or "")
    given = str(error).removeprefix(MERGING) if str(error).startswith(MERGING) else key  # as it was typed, if known
    if isinstance(error, MissingConfigException):
        return _missing_config(error)
    if isinstance(error, OverrideParseException):
        return _unreadable(str(error.override))
    if isinstance(cause, (ConfigAttributeError, ConfigKeyError)) and key:
        return unknown_key(key, groups)
    if isinstance(cause, ValidationError) and key:
        wanted = _first_line(cause) if key.startswith("hydra.") else f"{expected(key)} was expected"
        return f"{given} does not fit: {wanted}."
    if isinstance(cause, InterpolationResolutionError) and OWN_ERROR in str(cause):
        return _first_line(cause).removeprefix(OWN_ERROR)
    if isinstance(cause, InterpolationResolutionError) and key:
        return f"{key} cannot be worked out: {_first_line(cause)}."
    return f"{_first_line(cause)}." if isinstance(cause, OmegaConfBaseException) else str(error)


def _missing_config(error: MissingConfigException) -> str:
    group, _, option = (error.missing_cfg_file or "").rpartition("/")
    if group.startswith("size/"):
        return f"scale={option} does not go with this task: conf/{group}/ holds what does."
    if not error.options:
        return str(error).partition("\n\n")[0]  # the search path follows
    return f"{group}={option} is not one of {', '.join(error.options)}{did_you_mean(option, error.options)}."


def _unreadable(override: str) -> str:
    """Some characters are reserved in Hydra's grammar, for lists, mappings and sweeps."""
    key, equals, value = override.partition("=")
    if not equals:
        return f"'{override}' cannot be read as key=value: write it in one word, such as clip=flat."
    if value.endswith(",") or value.startswith(("[", "{")):
        return f"'{override}' cannot be read as key=value: a sweep is 1,2, a list [1,2], a mapping {{a:1}}, no quotes."
    quoted = value.replace('"', '\\"')
    return (
        f"'{override}' cannot be read as key=value: put a value with signs such as = [ ] {{ }} , : into quotes, "
        f"""'{key}="{quoted}"'."""
    )


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0].rstrip(".:")
