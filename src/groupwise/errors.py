"""Reports user mistakes in one sentence and bugs with a traceback, and maps them to exit codes."""

import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from errno import EDQUOT, EFBIG, ENOSPC
from functools import wraps
from typing import ParamSpec


class UserError(ValueError):
    """A mistake of the user. Its message says what was given, what is wrong with it, and how to fix it.

    `run.py` prints the message and exits with code 2; for a library it is an ordinary ``ValueError``.
    """


def reason(error: BaseException) -> str:
    """A library's error message on one line, short enough to be quoted in a message of ours."""
    if isinstance(error, KeyError):
        return f"{error} is missing"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    first = (lines or [type(error).__name__])[0].rstrip(".:")
    return _printable(first if len(first) <= 200 else first[:200] + "...")


def message(error: BaseException, most: int = 500) -> str:
    """An error's message for a terminal: one line, printable, and without its middle if it is long."""
    text = _printable(" ".join(str(error).split()))
    return text if len(text) <= most else f"{text[: most - 200]} ... {text[-195:]}"


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() else "?" for c in text)


class ProcessFailed(RuntimeError):
    """A process of a run died or raised an unexpected exception; `run.py` prints the message and exits with code 1."""


EXTRAS = {
    **dict.fromkeys(("transformers", "tokenizers", "datasets", "peft", "sacrebleu", "rouge_score", "nltk"), "language"),
    **dict.fromkeys(("sklearn", "torchvision", "pandas", "matplotlib", "hydra", "omegaconf", "yaml"), "suite"),
    "cryptography": "secure",
}
"""Optional packages -> the extra that installs them."""


@contextmanager
def environment_errors() -> Iterator[None]:
    """Turn errors of missing packages, files and full disks into a `UserError`."""
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in EXTRAS:
            raise
        raise UserError(
            f"This needs {package}, which is not installed: run pip install 'groupwise[{EXTRAS[package]}]'."
        ) from error
    except OSError as error:
        if error.filename is None and error.errno not in (ENOSPC, EDQUOT, EFBIG):
            raise
        place = error.filename or "the disk"
        raise UserError(f"{place}: {error.strerror}; fix that and run the same command again.") from error


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`` (did you mean X?)``, with X the known word closest to ``word``; empty if none is close."""
    close = get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f" (did you mean {close[0]}?)" if close else ""


def unknown(what: str, word: str, known: Iterable[str]) -> UserError:
    """The error for a name that is not among the known names of a kind of thing (``what``)."""
    known = list(known)
    return UserError(f"There is no {what} {word}{did_you_mean(word, known)}: choose one of {', '.join(known)}.")


MISTAKE, BUG, INTERRUPTED = 2, 1, 130


def report(error: Exception) -> None:
    """Print an error on stderr: the message of a mistake, the traceback of a bug."""
    if isinstance(error, UserError | ProcessFailed):
        print(f"error: {message(error)}", file=sys.stderr)
    else:
        traceback.print_exception(error)


Given = ParamSpec("Given")


def command(main: Callable[Given, int]) -> Callable[Given, int]:
    """Wrap a command's `main`, which returns the exit code: a `UserError` is printed and gives code 2."""

    @wraps(main)
    def run(*arguments: Given.args, **options: Given.kwargs) -> int:
        try:
            with environment_errors():
                code = main(*arguments, **options)
                sys.stdout.flush()
                return code
        except BrokenPipeError:  # the reader of the pipe has exited: ... | head
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # so that flushing at exit does not fail
            return 0
        except UserError as error:
            print(f"error: {error}", file=sys.stderr)
            return MISTAKE
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            return INTERRUPTED

    return run


PASSED = ("groupwise", "contextlib")
"""Packages whose own lines a warning never points at."""


def warn(message: str) -> None:
    """Warn at the line of the user's own code that called this package."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in PASSED:
        level, frame = level + 1, frame.f_back
    warnings.warn(message, stacklevel=level)


def tell_warnings() -> None:
    """Print warnings as one sentence on stderr, without their line of code."""
    warnings.formatwarning = lambda message, *_, **__: f"warning: {' '.join(str(message).split())}\n"


def exit_code(kinds: Iterable[str]) -> int:
    """The exit code for these exceptions, by name: 0 if there are none, 2 if all are mistakes, else 1."""
    kinds = list(kinds)
    if not kinds:
        return 0
    return MISTAKE if all(kind == UserError.__name__ for kind in kinds) else BUG
