"""Checks a model and its engine before training; `verify` is all that others need."""

from groupwise.clipping.verification.compare import verify

__all__ = ["verify"]
