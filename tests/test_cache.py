"""The cache folder is found by GROUPWISE_CACHE, XDG_CACHE_HOME or HOME, in this order."""

from groupwise.cache import cache_folder


def test_cache_folder_follows_the_environment(own_cache, monkeypatch, tmp_path):
    assert cache_folder() == own_cache
    monkeypatch.delenv("GROUPWISE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "groupwise"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_folder() == tmp_path / "home" / ".cache" / "groupwise"
