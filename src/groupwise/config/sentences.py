"""Turns errors of Hydra and OmegaConf into messages of one sentence."""

from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf.errors import (
    ConfigAttributeError,
    ConfigKeyError,
    InterpolationResolutionError,
    OmegaConfBaseException,
    ValidationError,
)

from groupwise.config.keys import FREE, OURS, key_types
from groupwise.errors import UserError, did_you_mean, message

COMPOSITION_ERRORS = (UserError, HydraException, OmegaConfBaseException, RecursionError)
"""Exceptions for a user's mistakes during composition; the last one is for circular values."""
MERGING = "Error merging override "
"""The start of Hydra's message for a value of the wrong type; the override follows."""
AMBIGUOUS = "Ambiguous value for argument "
"""The start of Hydra's message for several values without ``-m``; the override follows in quotes."""
NO_DEFAULT = "To append to your default list use +"
"""The end of Hydra's message for a group without a default; the override follows."""
OWN_ERROR = "UserError raised while resolving interpolation: "
"""The start of OmegaConf's message for a `UserError` in a resolver."""


def unknown_key(key: str, groups: tuple[str, ...] = ()) -> str:
    """Return the message for a key that is not in the schema, with the key that was probably meant."""
    for mapping, example in FREE.items():
        if key.startswith(f"{mapping}."):
            return f"{mapping} has no entry {key}; put a plus before a new one: {example}."
    known = key_types()
    last = key.rpartition(".")[2]
    same_end = [name for name in known if name.rpartition(".")[2] in (last, OURS.get(last))]
    hint = f" (did you mean {' or '.join(same_end)}?)" if same_end else did_you_mean(key, [*known, *groups])
    if key.startswith("hydra.launcher."):
        hint = " (hydra/launcher=joblib and hydra/launcher=slurm have other keys)"
    return f"there is no key or group {key}{hint}; `python run.py --help` lists them."


def in_one_sentence(error: BaseException, groups: tuple[str, ...] = ()) -> str:
    """Return an error of composition as one sentence, which may suggest one of ``groups``."""
    return message(UserError(_sentence(error, groups)))


def _sentence(error: BaseException, groups: tuple[str, ...]) -> str:
    cause = error.__cause__ if isinstance(error.__cause__, OmegaConfBaseException) else error
    key = str(getattr(cause, "full_key", None) or "")
    given = str(error).removeprefix(MERGING) if str(error).startswith(MERGING) else key  # as typed, if known
    if isinstance(error, MissingConfigException):
        return _missing_config(error)
    if isinstance(error, OverrideParseException):
        return (
            f"'{error.override}' cannot be parsed as key=value: write it as in clip=flat, a list as [1,2], a mapping "
            """as {a:1}, and put a value with special characters in quotes, 'key="a=b"'."""
        )
    if str(error).startswith(AMBIGUOUS):
        return f"{_first_line(error).removeprefix(AMBIGUOUS)[1:-1]} has several values, which are a sweep: add -m."
    plus = str(error).partition(NO_DEFAULT)[2]
    if plus.partition("=")[0] in groups:
        return f"{plus} needs its plus: write +{plus}."
    if isinstance(cause, (ConfigAttributeError, ConfigKeyError)) and key:
        return unknown_key(key, groups)
    if isinstance(cause, ValidationError) and key:
        return f"{given} has the wrong type: {_first_line(cause)}."
    if isinstance(cause, InterpolationResolutionError) and OWN_ERROR in str(cause):
        return _first_line(cause).removeprefix(OWN_ERROR)
    if isinstance(cause, InterpolationResolutionError) and key:
        return f"{key} cannot be resolved: {_first_line(cause)}."
    return f"{_first_line(cause)}." if isinstance(cause, OmegaConfBaseException) else str(error)


def _missing_config(error: MissingConfigException) -> str:
    group, _, option = (error.missing_cfg_file or "").rpartition("/")
    if group.startswith("size/"):
        return f"scale={option} is not available for this task: see conf/{group}/ for those that are."
    if not error.options:
        return str(error).partition("\n\n")[0]  # the search path follows
    return f"{group}={option} is not one of {', '.join(error.options)}{did_you_mean(option, error.options)}."


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0].rstrip(".:")
