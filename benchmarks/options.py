"""The command line of a benchmark: `key=value ...`, read into a dataclass whose fields are what --help lists."""

import inspect
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import Field, field, fields
from typing import Any, TypeVar

from omegaconf import OmegaConf
from omegaconf.errors import ConfigKeyError, OmegaConfBaseException

from groupwise import errors
from groupwise.errors import UserError, did_you_mean, unknown

T = TypeVar("T")
OUT = "results/measured/benchmarks"
"""The folder of the committed rows."""
INTERRUPTED = 130


def option(default: Any, text: str) -> Any:
    """A field of a dataclass of options, and what --help says of it."""
    return field(default=default, metadata={"help": text})


def out(file: str) -> Any:
    """The option of where a file of rows is."""
    return option(OUT, f"the folder of {file}")


def help_text(schema: type) -> str:
    """What --help prints of these options."""
    lines = []
    for each in fields(schema):
        start = f"  {each.name}={'' if each.default is None else str(each.default).lower()}"
        lines.append(f"{start:40s} {each.metadata.get('help', '')}".rstrip())
    return "\n".join(["options, key=value, with their defaults:", *lines])


def read(schema: type[T], arguments: Sequence[str]) -> T:
    """The command line `key=value …` as an instance of the dataclass `schema`.

    Raises:
        UserError: an unknown key, a value of another type, a number that is not above 0, a device that is not there.
    """
    known: dict[str, Field[Any]] = {each.name: each for each in fields(schema)}  # type: ignore[arg-type]
    for argument in arguments:
        key, equals, _ = argument.partition("=")
        if not equals:
            raise UserError(f"'{argument}' cannot be read as key=value; --help lists the keys.")
        if key not in known:
            raise UserError(f"there is no key {key}{did_you_mean(key, known)}; --help lists them.")
    try:
        merged = OmegaConf.merge(OmegaConf.structured(schema), OmegaConf.from_cli(list(arguments)))
        options = OmegaConf.to_object(merged)
    except ConfigKeyError as error:
        raise UserError(f"there is no key {error.full_key}; --help lists them.") from None
    except OmegaConfBaseException as error:
        raise UserError(f"{error.full_key} does not fit: {str(error).splitlines()[0]}.") from None
    assert isinstance(options, schema)
    for name in known:
        value = getattr(options, name)
        if isinstance(value, int | float) and not isinstance(value, bool) and not value > 0:
            raise UserError(f"{name}={value} was given; use a number above 0.")
        if name == "device":
            check_device(value)
    return options


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
    """The `main` of the benchmark that `run` does with its options: it returns the exit code, 2 for a mistake.

    --help prints the docstring of the module of `run`, and the options.
    """

    @errors.command
    def main(arguments: Sequence[str] | None = None) -> int:
        given = list(sys.argv[1:] if arguments is None else arguments)
        if {"-h", "--help"} & set(given):
            print(f"{inspect.getdoc(inspect.getmodule(run))}\n\n{help_text(schema)}")
            return 0
        try:
            return run(read(schema, given)) or 0
        except KeyboardInterrupt:
            print("interrupted: only rows that were finished are written", file=sys.stderr)
            return INTERRUPTED

    return main
