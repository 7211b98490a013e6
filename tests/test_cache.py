"""The cache helps, and whatever happens to it, never hurts."""

import os

from groupwise.cache import cache_folder, read_cache, write_cache


def test_what_was_written_is_read(own_cache):
    write_cache("kind", {"a": 1}, [1.5, "note"])
    assert read_cache("kind", {"a": 1}) == [1.5, "note"]
    assert read_cache("kind", {"a": 2}) is None
    assert not list(own_cache.rglob("*.partial"))


def test_a_folder_that_is_a_file_is_no_error(own_cache):
    own_cache.write_text("in the way")
    write_cache("kind", {"a": 1}, 1)
    assert read_cache("kind", {"a": 1}) is None


def test_a_failing_disk_leaves_nothing_behind(own_cache, monkeypatch):
    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    write_cache("kind", {"a": 1}, 1)
    assert read_cache("kind", {"a": 1}) is None
    assert not list(own_cache.rglob("*.partial"))


def test_the_folder_follows_the_environment(own_cache, monkeypatch, tmp_path):
    assert cache_folder() == own_cache
    monkeypatch.delenv("GROUPWISE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "groupwise"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_folder() == tmp_path / "home" / ".cache" / "groupwise"
