"""Shared by tests of whole runs."""

import pytest

from tests.checked import verify_once


@pytest.fixture(autouse=True)
def _checked_once(monkeypatch):
    """Runs of one model and mode are checked before training once a process: all would be told the same."""
    monkeypatch.setattr("groupwise.build.verify", verify_once)
