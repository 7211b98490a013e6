"""Fingerprints are those of the standard tool."""

import hashlib

from groupwise.data.text_examples import sha256_of_bytes, sha256_of_files


def test_files_are_named_by_their_path_under_the_root(tmp_path):
    path = tmp_path / "folder" / "data.bin"
    path.parent.mkdir()
    path.write_bytes(b"0123456789" * 100_000)
    assert sha256_of_files([path], tmp_path) == {"folder/data.bin": hashlib.sha256(b"0123456789" * 100_000).hexdigest()}


def test_bytes_are_hashed_as_one_stream():
    assert sha256_of_bytes(b"ab", b"c") == hashlib.sha256(b"abc").hexdigest()
