"""Reads the command line of a tool, `key=value ...`, into a dataclass; --help lists the fields."""

import inspect
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import field, fields
from types import NoneType
from typing import Any, TypeVar, get_args, get_type_hints

from groupwise import errors
from groupwise.errors import UserError, did_you_mean

T = TypeVar("T")
BOOLS = {"true": True, "false": False}
SUITE = {"noise_multiplier": "sigma", "batch_size": "batch", "dataset_size": "n"}
"""Names in run.py and make_private -> names in the tools, which accept both."""
EXPECTED = {bool: "true or false", int: "a whole number", float: "a number"}


def option(default: Any, text: str, *, among: Sequence[str] = (), zero: bool = False, infinite: bool = False) -> Any:
    """A field of a dataclass of options, with its --help text.

    Numbers must be finite and positive, unless `zero` or `infinite` is true. `among` lists the allowed words.
    """
    return field(default=default, metadata={"help": text, "among": among, "zero": zero, "infinite": infinite})


def help_text(schema: type) -> str:
    """The part of --help that lists these options."""
    lines = []
    for each in fields(schema):
        start = f"  {each.name}={'' if each.default is None else str(each.default).lower()}"
        lines.append(f"{start:40s} {each.metadata.get('help', '')}".rstrip())
    return "\n".join(["options, key=value, with their defaults:", *lines])


def read(schema: type[T], words: Sequence[str]) -> T:
    """An instance of the dataclass `schema` from words `key=value`; `null` is None if the field allows it.

    Raises:
        UserError: an unknown key, or a value that does not fit.
    """
    hints, known = get_type_hints(schema), {each.name: each for each in fields(schema)}  # type: ignore[arg-type]
    given: dict[str, Any] = {}
    for word in words:
        key, equals, text = word.partition("=")
        key = key if key in known else SUITE.get(key, key)
        if not equals:
            raise UserError(f"'{word}' cannot be read as key=value; --help lists the keys.")
        if key not in known:
            raise UserError(f"there is no key {key}{did_you_mean(key, known)}; --help lists them.")
        kinds, rules = get_args(hints[key]) or (hints[key],), known[key].metadata
        given[key] = None if text == "null" and NoneType in kinds else _value(kinds[0], key, text, **rules)
    return schema(**given)


def _value(
    kind: type, key: str, text: str, among: Sequence[str], zero: bool, infinite: bool, help: str = ""
) -> bool | float | str:
    if kind is str:
        if among and text not in among:
            raise UserError(f"{key}={text} is unknown{did_you_mean(text, among)}: give {', '.join(among)}.")
        return text
    if kind is bool and text.lower() in BOOLS:
        return BOOLS[text.lower()]
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if kind is bool or math.isnan(value) or (kind is int and not value.is_integer()):
        raise UserError(f"{key}={text} does not fit: {EXPECTED[kind]} was expected.")
    if value < 0 or (value == 0 and not zero) or (value == math.inf and not infinite):
        raise UserError(f"{key}={text} was given; give a finite number {'of at least' if zero else 'above'} 0.")
    return int(value) if kind is int else value


def command(
    schema: type[T], run: Callable[[Any], int | None], read: Callable[[type[T], list[str]], Any] = read
) -> Callable[..., int]:
    """The `main` of a tool: it reads the options, calls `run`, and returns the exit code, which is 2 for a mistake.

    --help prints the docstring of the module of `run`, and the options.
    """

    @errors.command
    def main(arguments: Sequence[str] | None = None) -> int:
        given = list(sys.argv[1:] if arguments is None else arguments)
        if {"-h", "--help"} & set(given):
            print(f"{inspect.getdoc(inspect.getmodule(run))}\n\n{help_text(schema)}")
            return 0
        return run(read(schema, given)) or 0

    return main
