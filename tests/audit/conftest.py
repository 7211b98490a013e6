"""Shared by the audit's tests."""

import pytest

from tests.checked import verify_once


@pytest.fixture(autouse=True)
def _verified_once(monkeypatch):
    """Engines of one kind are checked before the first audit of them: the check takes longer than many an audit."""
    monkeypatch.setattr("groupwise.build.verify", verify_once)
