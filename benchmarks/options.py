"""The options of benchmarks: `groupwise.options`, lists by commas, and devices that are there."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from groupwise import options
from groupwise.errors import UserError, unknown
from groupwise.options import option

__all__ = ["OUT", "command", "device", "names", "option", "out", "read", "split"]
T = TypeVar("T")
OUT = "results/measured/benchmarks"
"""The folder of the committed rows."""


def out(file: str) -> Any:
    """The option of where a file of rows is."""
    return option(OUT, f"the folder of {file}")


def device(default: str) -> Any:
    """The option of what to run on."""
    return option(default, "cpu or cuda", among=("cpu", "cuda"))


def read(schema: type[T], arguments: Sequence[str]) -> T:
    """As `groupwise.options.read`.

    Raises:
        UserError: device=cuda without a GPU too.
    """
    found = options.read(schema, arguments)
    if getattr(found, "device", "cpu") == "cuda":
        import torch

        if not torch.cuda.is_available():
            raise UserError("device=cuda was asked for, but torch sees no GPU here: give device=cpu.")
    return found


def split(names: str) -> list[str]:
    """Names given by commas."""
    return [part.strip() for part in str(names).split(",") if part.strip()]


def names(key: str, given: str, known: Iterable[str], first: str | None = None) -> list[str]:
    """What the value of an option names, by commas; "all" is all that are known. `first` is always there, and first.

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
    """As `groupwise.options.command`."""
    return options.command(schema, run, read)
