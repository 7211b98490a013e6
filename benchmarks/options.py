"""Options of the benchmarks: `groupwise.options`, lists separated by commas, and a check of the device."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from groupwise import options
from groupwise.errors import UserError, unknown
from groupwise.options import option

__all__ = ["OUT", "command", "device", "names", "option", "out", "read", "sizes", "split"]
T = TypeVar("T")
OUT = "results/measured/benchmarks"
"""The folder of the committed rows."""


def out(file: str) -> Any:
    """The option for the folder that a file of rows is written to."""
    return option(OUT, f"the folder of {file}")


def device(default: str) -> Any:
    """The option for the device."""
    return option(default, "cpu or cuda", among=("cpu", "cuda"))


def read(schema: type[T], arguments: Sequence[str]) -> T:
    """`groupwise.options.read`, which also refuses device=cuda without a GPU.

    Raises:
        UserError: an unknown option or value; device=cuda without a GPU.
    """
    found = options.read(schema, arguments)
    if getattr(found, "device", "cpu") == "cuda":
        import torch

        if not torch.cuda.is_available():
            raise UserError("device=cuda was asked for, but torch sees no GPU here: give device=cpu.")
    return found


def split(names: str) -> list[str]:
    """Names separated by commas."""
    return [part.strip() for part in str(names).split(",") if part.strip()]


def sizes(key: str, given: str) -> list[int]:
    """Sizes separated by commas.

    Raises:
        UserError: one of them is no whole number of at least 1.
    """
    parts = split(given)
    if not parts or not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise UserError(f"{key}={given} was given; use whole numbers of at least 1, separated by commas.")
    return [int(part) for part in parts]


def names(key: str, given: str, known: Iterable[str], first: str | None = None) -> list[str]:
    """The names in the value of an option, separated by commas ("all": all known ones), with `first` put first.

    Raises:
        UserError: one of them is unknown.
    """
    known = list(known)
    found = known if given == "all" else split(given)
    if first is not None:
        found = list(dict.fromkeys([first, *found]))
    for name in found:
        if name not in known:
            raise unknown(key, name, known)
    return found


def command(
    schema: type[T], run: Callable[[Any], int | None], read: Callable[[type[T], list[str]], Any] = read
) -> Callable[..., int]:
    """`groupwise.options.command`, with this module's `read`."""
    return options.command(schema, run, read)
