"""Engines are verified once for each kind, as the check takes longer than many audits."""

from tests.checked import verified_once  # noqa: F401
