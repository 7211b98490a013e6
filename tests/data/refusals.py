"""Checks that a loader refuses bad data in one sentence."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from groupwise.errors import UserError


def refused(read: Callable[..., object], *given: Any, **options: Any) -> str:
    """The one-sentence message with which `read` refuses its arguments; it names the file."""
    with pytest.raises(UserError) as caught:
        read(*given, **options)
    message = str(caught.value)
    assert "\n" not in message and message.endswith(".")
    assert all(path.name in message for path in given if isinstance(path, Path) and path.is_file())
    return message
