"""What is said of failures, and the exit code that they make."""

from __future__ import annotations

import sys
import traceback
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import TextIO

from groupwise.errors import ProcessFailed, UserError, told
from groupwise.launch.sweep_folder import CELLS, failures, name_of, read_cells, unfinished

MISTAKE, BUG, INTERRUPTED = 2, 1, 130


def report(error: Exception) -> None:
    """A mistake in one sentence, a bug with its traceback, on stderr."""
    if isinstance(error, UserError | ProcessFailed):
        print(f"error: {told(error)}", file=sys.stderr)
    else:
        traceback.print_exception(error)


def tell_warnings() -> None:
    """From now on what a user is warned of is one sentence on stderr, without the line of code that it came from."""
    usual = warnings.showwarning

    def show(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        if category is UserWarning:
            print(f"warning: {' '.join(str(message).split())}", file=file or sys.stderr)
        else:
            usual(message, category, filename, lineno, file, line)

    warnings.showwarning = show


def exit_code(kinds: Iterable[str]) -> int:
    """Of the exceptions' names: 0 without any, 2 where all are mistakes, else 1."""
    kinds = list(kinds)
    if not kinds:
        return 0
    return MISTAKE if all(kind == UserError.__name__ for kind in kinds) else BUG


def report_sweep(folder: Path, crash: Exception | None = None) -> int:
    """List what failed, on stderr, and return the exit code.

    Args:
        crash: what ended the launcher itself, if it did not get to the end; then cells without a result count too.

    Returns:
        0 also where the launcher ended before any cell began: then `crash` is all that there is to tell.
    """
    failed = failures(folder)
    lost = [] if crash is None else unfinished(folder)
    cells = read_cells(folder) if (folder / CELLS).is_file() else []
    if crash is not None and not failed and (isinstance(crash, UserError) or len(lost) == len(cells)):
        return 0  # nothing has run: the launcher could not even start
    if failed or lost:
        print(f"{len(failed) + len(lost)} of {len(cells) or 'the'} cells failed:", file=sys.stderr)
    for failure in failed:
        print(
            f"  {name_of(folder, failure.file.stem) or failure.cell}: {failure.kind} ({failure.file})", file=sys.stderr
        )
    for cell in lost:
        print(f"  {cell['name']}: killed, or never begun ({type(crash).__name__})", file=sys.stderr)
    return exit_code([failure.kind for failure in failed] + [type(crash).__name__ for _ in lost])
