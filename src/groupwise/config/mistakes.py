"""Says what a composition error means, in one sentence for the person at the command line."""

from __future__ import annotations

import errno

from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf.errors import (
    ConfigAttributeError,
    ConfigKeyError,
    InterpolationResolutionError,
    MissingMandatoryValue,
    OmegaConfBaseException,
    ValidationError,
)

from groupwise.config.keys import expected, key_types
from groupwise.errors import UserError, did_you_mean, told

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
    known = key_types()
    section, _, last = key.rpartition(".")
    same_end = [name for name in known if name.rpartition(".")[2] == last]
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
    return told(UserError(_sentence(error, groups)))


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
