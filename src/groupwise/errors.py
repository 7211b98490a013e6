"""Reports user mistakes in one sentence and bugs with a traceback, and maps them to exit codes."""

import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from errno import EDQUOT, ENOSPC
from functools import wraps
from typing import ParamSpec


class UserError(ValueError):
    """A mistake in what the user gave: one sentence saying what was given, what was expected and how to fix it.

    `run.py` prints the sentence and leaves with exit code 2; libraries see an ordinary ``ValueError``.
    """


def reason(error: BaseException) -> str:
    """A library's error message on one line, short enough for brackets in a sentence of ours."""
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
    """One of a run's processes died or hit a bug: one sentence on which and how; `run.py` leaves with exit code 1."""


EXTRAS = {
    **dict.fromkeys(("transformers", "tokenizers", "datasets", "peft", "sacrebleu", "rouge_score", "nltk"), "language"),
    **dict.fromkeys(("sklearn", "torchvision", "pandas", "matplotlib", "hydra", "omegaconf", "yaml"), "suite"),
    "cryptography": "secure",
}
"""Packages that are imported where they are needed -> the extra that brings them."""


@contextmanager
def environment_errors() -> Iterator[None]:
    """A package that is not installed, or a file or disk that refuses, becomes a `UserError`."""
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
        if error.filename is None and error.errno not in (ENOSPC, EDQUOT):
            raise
        place = error.filename or "the disk"
        raise UserError(f"{place}: {error.strerror}; fix that and run the same command again.") from error


def did_you_mean(word: str, known: Iterable[str], in_full: Mapping[str, str] | None = None) -> str:
    """`` (did you mean X?)``, X the known word close to ``word`` or its ``in_full``; empty if none is."""
    close = get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f" (did you mean {(in_full or {}).get(close[0], close[0])}?)" if close else ""


def unknown(what: str, word: str, known: Iterable[str]) -> UserError:
    """The error for a word that is none of the known names of what it should name."""
    known = list(known)
    return UserError(f"There is no {what} {word}{did_you_mean(word, known)}: choose one of {', '.join(known)}.")


MISTAKE, BUG, INTERRUPTED = 2, 1, 130


def report(error: Exception) -> None:
    """A mistake in one sentence, a bug with its traceback, on stderr."""
    if isinstance(error, UserError | ProcessFailed):
        print(f"error: {message(error)}", file=sys.stderr)
    else:
        traceback.print_exception(error)


Given = ParamSpec("Given")


def command(main: Callable[Given, int]) -> Callable[Given, int]:
    """A command's `main`, which returns the exit code: a mistake inside is one sentence on stderr, and code 2."""

    @wraps(main)
    def run(*arguments: Given.args, **options: Given.kwargs) -> int:
        try:
            with environment_errors():
                code = main(*arguments, **options)
                sys.stdout.flush()
                return code
        except BrokenPipeError:  # the reader has closed the pipe: ... | head
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is buffered goes nowhere at exit
            return 0
        except UserError as error:
            print(f"error: {error}", file=sys.stderr)
            return MISTAKE
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            return INTERRUPTED

    return run


PASSED = ("groupwise", "contextlib")
"""Packages whose lines a warning does not point at."""


def warn(message: str) -> None:
    """Warn at the line of the user's own code that called this package."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in PASSED:
        level, frame = level + 1, frame.f_back
    warnings.warn(message, stacklevel=level)


def tell_warnings() -> None:
    """From now on a warning is one sentence on stderr, without the line of code that it came from."""
    warnings.formatwarning = lambda message, *_, **__: f"warning: {' '.join(str(message).split())}\n"


def exit_code(kinds: Iterable[str]) -> int:
    """Of the exceptions' names: 0 without any, 2 where all are mistakes, else 1."""
    kinds = list(kinds)
    if not kinds:
        return 0
    return MISTAKE if all(kind == UserError.__name__ for kind in kinds) else BUG
