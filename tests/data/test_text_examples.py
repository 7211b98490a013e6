"""Targets are gathered by source, and examples have a fingerprint of their own."""

import os
import stat
from pathlib import Path

import pytest

from groupwise.data.text_examples import read_json_list, read_text
from groupwise.errors import UserError


def test_a_byte_order_mark_is_left_out(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfcaf\xc3\xa9\r\n")
    assert read_text(tmp_path / "a.txt", "put it there") == "café\r\n"


def odd(path: Path, what: bytes | str | int | None) -> Path:
    """Something in the place of a file: content, a link, or what a type of it says; nothing."""
    if isinstance(what, bytes):
        path.write_bytes(what)
    elif isinstance(what, str):
        path.symlink_to(what)
    elif what == stat.S_IFDIR:
        path.mkdir()
    elif what == stat.S_IFIFO:
        os.mkfifo(path)
    elif what is not None:
        path.touch(mode=what)
    return path


@pytest.mark.parametrize(
    ("what", "words"),
    [
        *(
            (nothing, r"a is missing; put it there\.$")
            for nothing in (None, stat.S_IFDIR, stat.S_IFIFO, "a", "/dev/zero")
        ),
        (b"caf\xe9", r"a is not UTF-8 \(byte 3\)"),
        pytest.param(0, "cannot be read", marks=pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")),
        *((json, r"a is not a list of objects") for json in (b'{"a": 1}', b"[]", b'["a"]', b"3")),
        (b'[{"a": 1},\n{"b": ', "a is not readable JSON"),
        (b"[" * 100_000, r"not readable JSON \(maximum recursion depth exceeded"),
        (b"[1" + b"0" * 5000 + b"]", "not readable JSON .*digits"),
        (b'[{"a": "\\ud800"}]', "surrogates not allowed"),
    ],
)
def test_what_cannot_be_read_is_told_and_never_waited_for(tmp_path, what, words):
    with pytest.raises(UserError, match=words):
        read_json_list(odd(tmp_path / "a", what), "put it there")
