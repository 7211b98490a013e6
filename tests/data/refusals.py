"""What a loader says of bad data."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from groupwise.errors import UserError


def refused(read: Callable[..., object], *given: Any, **options: Any) -> str:
    """The one sentence in which `read` refuses what it is given; a file is named in it."""
    with pytest.raises(UserError) as caught:
        read(*given, **options)
    message = str(caught.value)
    assert "\n" not in message and message.endswith(".")
    assert all(path.name in message for path in given if isinstance(path, Path) and path.is_file())
    return message
