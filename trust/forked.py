"""Forks a process that has already imported torch; the output of the forks goes to files."""

import os
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path


def fork(live: Callable[[], int | None], out: Path, err: Path) -> int:
    """Fork a process that runs `live` and exits with its result, or with 1 and a traceback; returns its process id."""
    sys.stdout.flush()
    sys.stderr.flush()
    if pid := os.fork():
        return pid
    code: object = 1
    try:
        for number, path in ((1, out), (2, err)):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644), number)
        sys.stdout, sys.stderr = (
            os.fdopen(number, "w", buffering=1, encoding="utf-8", errors=errors, closefd=False)
            for number, errors in ((1, "strict"), (2, "backslashreplace"))
        )
        code = live() or 0
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 1)
