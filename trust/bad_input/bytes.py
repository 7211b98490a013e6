"""Damages files on their way: cut, flipped bits, holes, something else under the name."""

import gzip
import io
import os
import pickle
import random
import zipfile
from collections.abc import Callable
from pathlib import Path

Mutator = Callable[[random.Random, bytes], bytes]


class TouchesAFile:
    """Unpickled without care, it makes the file UNPICKLED in the current folder, which no refusal may leave."""

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str, int]]:
        return os.open, ("UNPICKLED", os.O_CREAT | os.O_WRONLY)


MALICE = pickle.dumps({"x_train": TouchesAFile(), b"data": TouchesAFile()})


def _cut(draw: random.Random, content: bytes) -> bytes:
    return content[: draw.randrange(len(content))]


def _flip(draw: random.Random, content: bytes) -> bytes:
    changed = bytearray(content)
    for _ in range(draw.choice((1, 1, 8, 200))):
        changed[draw.randrange(len(changed))] ^= 1 << draw.randrange(8)
    return bytes(changed)


def _hole(draw: random.Random, content: bytes) -> bytes:
    start = draw.randrange(len(content))
    size = draw.randrange(1, len(content))
    return content[:start] + bytes(min(size, len(content) - start)) + content[start + size :]


def _lost(draw: random.Random, content: bytes) -> bytes:
    start = draw.randrange(len(content))
    return content[:start] + content[start + draw.choice((1, 7, 512)) :]


def _added(draw: random.Random, content: bytes) -> bytes:
    start = draw.randrange(len(content) + 1)
    return content[:start] + draw.randbytes(draw.choice((1, 7, 512))) + content[start:]


def _twice(_: random.Random, content: bytes) -> bytes:
    return content + content


def _head(draw: random.Random, content: bytes) -> bytes:
    return draw.randbytes(16) + content[16:]


def _noise(draw: random.Random, content: bytes) -> bytes:
    return draw.randbytes(draw.choice((1, 100, len(content))))


def _other(draw: random.Random, _: bytes) -> bytes:
    """Another kind of file under the name."""
    page = b"<!DOCTYPE html><html><body>404 Not Found</body></html>"
    pointer = b"version https://git-lfs.github.com/spec/v1\n"
    nothing = (b"", b"\n", b"null", b"[]", b"{}", bytes(64))
    others = (page, pointer, b"\x89PNG\r\n\x1a\n", b"PK\x05\x06" + bytes(18), MALICE, gzip.compress(page, mtime=0))
    return draw.choice((*nothing, *others))


BYTES: tuple[Mutator, ...] = (_cut, _cut, _cut, _flip, _flip, _hole, _lost, _added, _twice, _head, _noise, _other)
"""For any file; the frequent ones more often."""


def any_bytes(draw: random.Random, content: bytes) -> bytes:
    """One of `BYTES`."""
    return draw.choice(BYTES)(draw, content)


def not_a_file(draw: random.Random, path: Path) -> None:
    """Something that is no file in the place of `path`: nothing, a folder, a loop, a pipe, a device."""
    path.unlink(missing_ok=True)
    what = draw.randrange(6)
    if what == 1:
        path.mkdir()
    elif what == 2:
        path.symlink_to(path.name)
    elif what == 3:
        os.mkfifo(path)
    elif what == 4:
        path.symlink_to("/dev/zero")
    elif what == 5:
        path.symlink_to("/nowhere/at/all")


def bomb(name: str, size: int) -> bytes:
    """A small zip whose one member unpacks to `size` bytes."""
    out = io.BytesIO()
    with (
        zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive,
        archive.open(name, "w", force_zip64=True) as member,
    ):
        for _ in range(size >> 24):
            member.write(bytes(1 << 24))
    return out.getvalue()
