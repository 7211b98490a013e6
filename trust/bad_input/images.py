"""Image files with something wrong in them: .npz, the standard folder of CIFAR-10, mosaics."""

import io
import random
import zipfile
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from trust.bad_input.attempt import Attempt, words
from trust.bad_input.bytes import MALICE, TouchesAFile, any_bytes, bomb, not_a_file

RUN = words(
    "scale=smoke task=cifar clip=flat privacy=noiseless data.name=cifar10 "
    "train.steps=1 train.batch_size=4 data.train_limit=16 eval.train_limit=4 data.image_size=8 train.device=cpu"
)
KEYS = ("x_train", "y_train", "x_test", "y_test")
BATCHES = (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch", "batches.meta")
MOSAICS = (*(f"train_shard{i}.webp" for i in range(5)), "test.webp")
BOMB = 5 << 30


def image_attempts(seed: int, count: int) -> Iterator[Attempt]:
    """`count` broken or unusual image files: three fifths .npz, the rest folders."""
    draw = random.Random(seed)
    for number in range(count):
        make, kind = (*[(_npz, "npz")] * 3, (_batches, "CIFAR batches"), (_mosaics, "mosaics"))[number % 5]
        own = random.Random(draw.random())
        where = "paths.data=cifar10.npz" if kind == "npz" and own.random() < 0.3 else "paths.data=."
        yield Attempt(f"file: {kind}", (*RUN, where), partial(make, own), trains=True)


def arrays() -> dict[str, Any]:
    """A small sound data set."""
    draw = np.random.default_rng(0)
    return {
        "x_train": draw.integers(0, 256, (40, 8, 8, 3), dtype=np.uint8),
        "y_train": np.arange(40) % 10,
        "x_test": draw.integers(0, 256, (20, 8, 8, 3), dtype=np.uint8),
        "y_test": np.arange(20) % 10,
    }


def _npz(draw: random.Random, folder: Path) -> None:
    path = folder / "cifar10.npz"
    content = arrays()
    way = draw.random()
    if way < 0.45:
        key = draw.choice(KEYS)
        content[key] = draw.choice(ARRAYS)(content[key])
    elif way < 0.5:
        del content[draw.choice(KEYS)]
    np.savez(path, **content)
    if way >= 0.85:
        path.write_bytes(draw.choice(ARCHIVES)(path.read_bytes()))
    elif way >= 0.55:
        path.write_bytes(any_bytes(draw, path.read_bytes()))
    elif way >= 0.5:
        not_a_file(draw, path)


ARRAYS: tuple[Callable[[np.ndarray], Any], ...] = (
    lambda x: x.astype(np.float32),
    lambda x: x.astype(np.float64) * np.nan,
    lambda x: x.astype(np.int8),
    lambda x: x.astype(">i8"),
    lambda x: x.astype(np.uint64) + np.uint64(2**63),
    lambda x: x.astype(complex),
    lambda x: x.astype(bool),
    lambda x: x.astype(str),
    lambda x: x.astype("S3"),
    lambda x: x.astype("M8[s]"),
    lambda x: x.astype(object),
    lambda x: np.array([TouchesAFile()], dtype=object),
    lambda x: np.zeros(len(x), dtype=[("a", "u1"), ("b", "f4")]),
    lambda x: x[:0],
    lambda x: x[:-1],
    lambda x: x[:1],
    lambda x: x[None],
    lambda x: x.ravel()[0],
    lambda x: x.ravel(),
    lambda x: x.T,
    lambda x: np.asfortranarray(x),
    lambda x: x - 1,
    lambda x: x + 250,
    lambda x: x[..., :2],
    lambda x: x[..., :0],
    lambda x: x[:, :0, :0] if x.ndim > 1 else x[:, None],
    lambda x: x[:, :7] if x.ndim > 1 else x * 0,
    lambda x: x[:, :1, :1] if x.ndim > 1 else x * 0 + 9,
    lambda x: np.repeat(x, 2, axis=0),
    lambda x: np.ma.masked_array(x),
)


def header(shape: tuple[int, ...], descr: str = "|u1") -> bytes:
    """The head of an .npy file that claims a shape."""
    out = io.BytesIO()
    np.lib.format.write_array_header_1_0(out, {"descr": descr, "fortran_order": False, "shape": shape})
    return out.getvalue()


def _member(name: str, content: bytes) -> Callable[[bytes], bytes]:
    """The sound archive with another file in the place of a member, or beside it."""

    def change(sound: bytes) -> bytes:
        out = io.BytesIO()
        with zipfile.ZipFile(io.BytesIO(sound)) as old, zipfile.ZipFile(out, "w") as new:
            for item in old.namelist():
                if item != name:
                    new.writestr(item, old.read(item))
            new.writestr(name, content)
        return out.getvalue()

    return change


@cache
def _bomb() -> bytes:
    return bomb("x_train.npy", BOMB)


ARCHIVES: tuple[Callable[[bytes], bytes], ...] = (
    _member("x_train.npy", header((10**12, 32, 32, 3))),
    _member("x_train.npy", header((2**62, 2**62, 2, 3))),
    _member("x_train.npy", header((-1, 8, 8, 3))),
    _member("x_train.npy", header((0, 8, 8, 3))),
    _member("x_train.npy", header((40, 8, 8, 3), "|O") + MALICE),
    _member("x_train.npy", header((40, 8, 8, 3))),
    _member("x_train.npy", MALICE),
    _member("x_train.npy", b"\x93NUMPY\x09\x00" + bytes(20)),
    _member("x_train.npy", b"\x93NUMPY\x01\x00\xff\xff" + b"(" * 65535),
    _member("y_train.npy", b"\x93NUMPY\x01\x00\x40\x00" + b"__import__('os').system('touch here')".ljust(64)),
    _member("../../../x_train.npy", b"escape"),
    _member("/tmp/groupwise-escape", b"escape"),
    _member("x_train", b"no array"),
    _member("y_train.npy", b""),
    lambda sound: _bomb(),
    lambda sound: MALICE,
    lambda sound: sound.replace(b"PK\x03\x04\x2d\x00\x00\x00", b"PK\x03\x04\x2d\x00\x01\x00"),
    lambda sound: sound.replace(b"x_train", b"x_tr\xff\x00n"),
    lambda sound: b"#!/bin/sh\n" + sound,
)


def _batches(draw: random.Random, folder: Path) -> None:
    """The standard folder with files that are not the published ones: none may be unpickled."""
    home = folder / "cifar-10-batches-py"
    home.mkdir()
    for name in draw.sample(BATCHES, draw.choice((0, 1, 6, 7))):
        (home / name).write_bytes(MALICE if draw.random() < 0.5 else any_bytes(draw, MALICE))
    if draw.random() < 0.2:
        not_a_file(draw, home / draw.choice(BATCHES))


@cache
def _picture(side: int, kind: str) -> bytes:
    from PIL import Image

    out = io.BytesIO()
    Image.new("RGB", (side, side), (1, 2, 3)).save(out, kind, lossless=True)
    return out.getvalue()


def _mosaics(draw: random.Random, folder: Path) -> None:
    home = folder / "cifar10"
    home.mkdir()
    for name in MOSAICS:
        (home / name).write_bytes(_picture(3200, "WEBP"))
    path = home / draw.choice((MOSAICS[0], MOSAICS[-1]))
    way = draw.random()
    if way < 0.6:
        path.write_bytes(any_bytes(draw, _picture(3200, "WEBP")))
    elif way < 0.9:
        path.write_bytes(
            _picture(*draw.choice(((64, "WEBP"), (3200, "PNG"), (3200, "GIF"), (14000, "PNG"), (1, "BMP"))))
        )
    else:
        not_a_file(draw, path)
