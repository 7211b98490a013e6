"""Shared by all tests."""

import pytest


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    """An empty cache folder for one test."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("GROUPWISE_CACHE", str(folder))
    return folder
