"""Tests wait for what they wait for, never for a time: a busy machine makes them slow, and fails none."""

import time
from collections.abc import Callable
from typing import Any

PATIENCE = 600.0
"""Seconds after which something will never come."""


def until(happened: Callable[[], Any], what: str) -> Any:
    """Wait until `happened()` is true, and return it.

    Raises:
        AssertionError: not even within `PATIENCE`, which is no measure of speed.
    """
    end = time.monotonic() + PATIENCE
    while not (found := happened()):
        assert time.monotonic() < end, f"never came: {what}"
        time.sleep(0.01)
    return found
