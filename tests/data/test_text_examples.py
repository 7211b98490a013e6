"""Targets are gathered by source, and examples have a fingerprint of their own."""

import hashlib
import os

import pytest

from groupwise.data.text_examples import Request, by_source, read_json_list, read_text, sha256_of_examples
from groupwise.errors import UserError


def test_the_targets_of_a_source_come_together_in_order():
    pairs = [("a", "1"), ("b", "2"), ("a", "3"), ("c", "4"), ("a", "1")]
    assert by_source(pairs) == [Request("a", ("1", "3", "1")), Request("b", ("2",)), Request("c", ("4",))]


def test_the_fingerprint_is_of_the_json():
    assert sha256_of_examples([["é", 1]]) == hashlib.sha256('[["é", 1]]'.encode()).hexdigest()


def test_a_byte_order_mark_is_left_out(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfcaf\xc3\xa9\r\n")
    assert read_text(tmp_path / "a.txt", "put it there") == "café\r\n"


def test_a_missing_file_comes_with_advice(tmp_path):
    with pytest.raises(UserError, match=r"gone.txt is missing; put it there\.$"):
        read_text(tmp_path / "gone.txt", "put it there")
    with pytest.raises(UserError, match="is missing"):
        read_text(tmp_path, "put it there")


def test_what_is_not_utf8_is_told(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"caf\xe9")
    with pytest.raises(UserError, match=r"a.txt is not UTF-8 \(byte 3\)"):
        read_text(tmp_path / "a.txt", "put it there")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read_is_told(tmp_path):
    (tmp_path / "a.txt").touch(mode=0)
    with pytest.raises(UserError, match="cannot be read"):
        read_text(tmp_path / "a.txt", "put it there")


@pytest.mark.parametrize("text", ['{"a": 1}', "[]", '["a"]', "3"])
def test_json_of_another_form_is_refused(tmp_path, text):
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(UserError, match=r"a.json does not hold a list of objects"):
        read_json_list(tmp_path / "a.json", "put it there")


def test_truncated_json_is_refused_with_the_line(tmp_path):
    (tmp_path / "a.json").write_text('[{"a": 1},\n{"b": ')
    with pytest.raises(UserError, match=r"a.json is not JSON \(line 2: .*truncated"):
        read_json_list(tmp_path / "a.json", "put it there")


@pytest.mark.parametrize("kind", ["pipe", "loop", "device"])
def test_what_is_no_file_is_not_waited_for(tmp_path, kind):
    path = tmp_path / "a.json"
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to(path if kind == "loop" else "/dev/zero")
    with pytest.raises(UserError, match="is missing; put it there"):
        read_text(path, "put it there")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("[" * 100_000, r"not readable JSON \(maximum recursion depth exceeded"),
        ("[1" + "0" * 5000 + "]", "not readable JSON .*digits"),
        ('[{"a": "\\ud800"}]', "a lone surrogate"),
    ],
)
def test_json_that_python_chokes_on(tmp_path, content, words):
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(UserError, match=words):
        read_json_list(tmp_path / "a.json", "put it there")
