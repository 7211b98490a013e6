"""Fixtures of the audit tests."""

import pytest

from tests.checked import verify_once


@pytest.fixture(autouse=True)
def _verify_once(monkeypatch):
    """Verify each kind of engine only before its first audit, as the check takes longer than many audits."""
    monkeypatch.setattr("groupwise.build.verify", verify_once)
