"""Waits for an event and never for a fixed time, so that a busy machine slows tests down but fails none."""

import time
from collections.abc import Callable
from typing import Any

PATIENCE = 600.0
"""Seconds after which waiting fails."""


def until(happened: Callable[[], Any], what: str) -> Any:
    """Wait until `happened()` is true, and return it.

    Raises:
        AssertionError: it did not become true within `PATIENCE` seconds.
    """
    end = time.monotonic() + PATIENCE
    while not (found := happened()):
        assert time.monotonic() < end, f"never came: {what}"
        time.sleep(0.01)
    return found
