"""Text and JSON files are read strictly, and unreadable ones are refused in one sentence."""

import os
import stat
from pathlib import Path

import pytest

from groupwise.data.text_examples import read_json_list, read_text
from groupwise.errors import UserError


def test_byte_order_mark_is_removed(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfcaf\xc3\xa9\r\n")
    assert read_text(tmp_path / "a.txt", "put it there") == "café\r\n"


def put(path: Path, what: bytes | str | int | None) -> Path:
    """Put content, a link, a folder, a pipe, a file with these permissions, or nothing at the path."""
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
def test_unreadable_file_is_refused_without_waiting(tmp_path, what, words):
    with pytest.raises(UserError, match=words):
        read_json_list(put(tmp_path / "a", what), "put it there")
