"""Gives the commands of this folder help, mistakes in one sentence, interruption and exit codes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from groupwise.errors import UserError

MISTAKE, INTERRUPTED = 2, 130


def command(run: Callable[[list[str]], None], help_text: str, kept: str, arguments: Sequence[str] | None) -> int:
    """Run a command line and return its exit code: 0, 2 for a mistake, 130 when interrupted.

    Args:
        run: does what the arguments ask for.
        help_text: printed for -h and --help.
        kept: what an interruption leaves behind, in words.
        arguments: None takes those of the process.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    if {"-h", "--help"} & set(given):
        print(help_text)
        return 0
    try:
        run(given)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return MISTAKE
    except KeyboardInterrupt:
        print(f"interrupted: {kept}", file=sys.stderr)
        return INTERRUPTED
    return 0
