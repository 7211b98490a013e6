"""Writes files atomically."""

import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from io import BufferedRandom
from pathlib import Path
from typing import IO, Any


def write_atomically(path: Path, write: Callable[[BufferedRandom], object], keep: Path | None = None) -> None:
    """Let ``write`` fill a temporary file beside ``path``, flush it to the disk, then rename it to ``path``.

    If the process is killed, ``path`` has its old or its new content. Only the owner may read it. If ``keep`` is given,
    an earlier file is renamed to it; if the process is killed then, only ``keep`` may exist. Raises ``OSError``.
    """
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".partial")
    try:
        with os.fdopen(descriptor, "w+b") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        if keep is not None and path.exists():
            os.replace(path, keep)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # so that the new name survives a power failure
    finally:
        os.close(folder)


def write_text(path: Path, text: str) -> None:
    """`write_atomically` for text, with the permissions of the umask."""
    write_atomically(path, lambda file: file.write(text.encode()))
    mask = os.umask(0)
    os.umask(mask)
    path.chmod(0o666 & ~mask)


def write_json(path: Path, content: Any) -> None:
    """`write_text` for indented JSON. Scalars of NumPy and torch become floats, and inf becomes ``Infinity``."""
    write_text(path, json.dumps(content, indent=2, default=float) + "\n")


def why_unwritable(folder: Path) -> str | None:
    """Why a folder, which may not exist yet, cannot be written to; None if it can."""
    nearest = next(parent for parent in (folder.absolute(), *folder.absolute().parents) if os.path.lexists(parent))
    if not nearest.is_dir():
        return f"{nearest} is not a folder"
    return None if os.access(nearest, os.W_OK | os.X_OK) else f"no permission to write in {nearest}"


def remove(entry: Path) -> None:
    """Remove a file, a link, or a folder with its contents."""
    if entry.is_dir() and not entry.is_symlink():
        shutil.rmtree(entry)
    else:
        entry.unlink()


def lock(path: Path, *, wait: bool = False) -> IO[bytes] | None:
    """Lock a file until the returned file is closed; if another process has the lock, wait or return None."""
    file = open(path, "ab")  # noqa: SIM115 (the caller closes it)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        file.close()
        return None
    except OSError:
        pass  # a file system without locks
    return file
