"""Runs Python on the emulated GPU, each time in a fork of a process that has loaded what takes seconds.

A line of stdin is a JSON list: the code, its arguments, and the file for its output; errors go to <file>-errors. A line
of stdout is the exit code.
"""

import json
import os
import sys
from functools import partial
from pathlib import Path

from benchmarks.emulated import guard
from trust.forked import fork


def main() -> None:
    guard.load()
    from benchmarks.emulated.device import EmulatedGPU

    with EmulatedGPU():  # which brings much; to compute would start threads, and forks have none
        pass
    guard.load = lambda: None
    for line in sys.stdin:
        code, arguments, told = json.loads(line)
        child = fork(partial(_live, code, arguments), Path(told), Path(f"{told}-errors"))
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


def _live(code: str, arguments: list[str]) -> None:
    """The rest of a fork's life."""
    sys.argv = ["-c", *arguments]
    exec(code, {"__name__": "__main__"})


if __name__ == "__main__":
    main()
