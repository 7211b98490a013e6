"""Runs Python on the emulated GPU, each time in a fork of a process that has loaded what takes seconds.

A line of stdin is a JSON list: the code, its arguments, and the file that takes what it writes. A line of stdout is the
exit code.
"""

import json
import os
import sys
import traceback

from benchmarks.emulated import guard


def main() -> None:
    guard.load()
    from benchmarks.emulated.device import EmulatedGPU

    with EmulatedGPU():  # which brings much; to compute would start threads, and forks have none
        pass
    guard.load = lambda: None
    for line in sys.stdin:
        code, arguments, told = json.loads(line)
        if (child := os.fork()) == 0:
            _live(code, arguments, told)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


def _live(code: str, arguments: list[str], told: str) -> None:
    """The rest of a fork's life."""
    status = 1
    try:
        for number in (1, 2):
            os.dup2(os.open(told, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
        sys.argv = ["-c", *arguments]
        exec(code, {"__name__": "__main__"})
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    main()
