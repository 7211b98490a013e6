"""The options of benchmarks: `groupwise.options`, lists by commas, and devices that are there."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from groupwise import options
from groupwise.errors import UserError, unknown
from groupwise.options import option

__all__ = ["OUT", "check_device", "command", "names", "option", "out", "read", "split"]
T = TypeVar("T")
OUT = "results/measured/benchmarks"
"""The folder of the committed rows."""


def out(file: str) -> Any:
    """The option of where a file of rows is."""
    return option(OUT, f"the folder of {file}")


def read(schema: type[T], arguments: Sequence[str]) -> T:
    """As `groupwise.options.read`; a device must be there."""
    found = options.read(schema, arguments)
    if hasattr(found, "device"):
        check_device(found.device)
    return found


def check_device(device: str) -> None:
    """Refuse a device that is not there.

    Raises:
        UserError: neither cpu nor cuda; cuda without a GPU.
    """
    if device not in ("cpu", "cuda"):
        raise UserError(f"device={device} is unknown: give cpu or cuda.")
    if device == "cuda":
        import torch

        if not torch.cuda.is_available():
            raise UserError("device=cuda was asked for, but torch sees no GPU here: give device=cpu.")


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
