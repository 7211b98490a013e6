"""Watches a process from inside: notes what it writes outside of its folders, and cuts its network."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
CHANGES = {"os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.link", "os.symlink", "os.chmod", "os.truncate"}
"""Audit events whose first arguments are paths that are changed."""
TWO_PATHS = {"os.rename", "os.link", "os.symlink"}
NETWORK = {"socket.connect", "socket.getaddrinfo", "socket.gethostbyname"}
PROGRAMS = {"subprocess.Popen", "os.system", "os.exec", "os.posix_spawn"}
MAY_START = {"git", "uname"}
"""The record asks for the commit and the machine."""


def watch(allowed: Sequence[Path], report: Path) -> None:
    """From now on, for the life of this process: note in `report` every change of a file outside of `allowed`, every
    program started but git, and refuse every connection with an `OSError`.

    An audit hook of Python: code of C libraries that opens files by itself (torch's zip writer) is not seen.
    """
    homes = tuple(f"{path.resolve()}{os.sep}" for path in allowed)
    note = os.open(report, os.O_WRONLY | os.O_APPEND)

    def inside(path: Any, itself: bool) -> bool:
        if isinstance(path, int) or path is None:
            return True
        name = os.fsdecode(path)
        real = (
            os.path.join(os.path.realpath(os.path.dirname(name)), os.path.basename(name))
            if itself
            else os.path.realpath(name)
        )
        return f"{real}{os.sep}".startswith(homes) or real.startswith(("/dev/null", "/dev/shm/"))

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event in NETWORK:
            if event == "socket.connect" and isinstance(args[1], str | bytes):
                return  # a socket of this machine's own
            raise OSError(f"the network is cut here ({event})")
        changed: Sequence[Any] = ()
        if event == "open":
            _, mode, flags = args
            if (isinstance(mode, str) and set(mode) & set("wax+")) or (mode is None and flags & WRITING):
                changed = args[:1]
        elif event in CHANGES:
            changed = args[: 2 if event in TWO_PATHS else 1]
        elif event in PROGRAMS:
            program = args[0] if event != "subprocess.Popen" else args[1][0]
            if Path(os.fsdecode(program)).name not in MAY_START:
                os.write(note, f"{event} {args!r}\n".encode(errors="replace"))
        for path in changed:
            if not inside(path, event != "open"):
                os.write(note, f"{event} {os.fsdecode(path)}\n".encode(errors="replace"))

    sys.addaudithook(hook)
