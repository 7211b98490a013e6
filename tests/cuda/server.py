"""Runs Python code on the emulated GPU, each time in a fork of a process that has already imported torch.

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

    with EmulatedGPU():  # imports lazily; computing would start threads, which a fork does not have
        pass
    guard.load = lambda: None
    for line in sys.stdin:
        code, arguments, output = json.loads(line)
        child = fork(partial(_execute, code, arguments), Path(output), Path(f"{output}-errors"))
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


def _execute(code: str, arguments: list[str]) -> None:
    """Execute the code in the fork."""
    sys.argv = ["-c", *arguments]
    exec(code, {"__name__": "__main__"})


if __name__ == "__main__":
    main()
