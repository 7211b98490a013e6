"""Shared by tests of whole runs."""

import pytest

from tests.checked import verify_once


@pytest.fixture(autouse=True)
def _checked_once(monkeypatch):
    """Run the check before training once in this process for each model and clipping mode."""
    monkeypatch.setattr("groupwise.build.verify", verify_once)
