"""Forks of a process in which torch is loaded already, whose words go to files."""

import os
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path


def fork(live: Callable[[], int | None], out: Path, err: Path) -> int:
    """The number of a new process that ends with what `live` returns or exits with, or with 1 and its traceback."""
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
