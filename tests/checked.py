"""Checks an engine before training once for all trainers of its kind: the check takes longer than a test's steps."""

from collections.abc import Hashable, Iterator
from contextlib import contextmanager

import pytest

_SEEN: set[Hashable] = set()


@contextmanager
def checked_once(kind: Hashable) -> Iterator[None]:
    """The first trainer of its kind that this process makes here is checked; those after it would be told the same."""
    with pytest.MonkeyPatch.context() as patch:
        if kind in _SEEN:
            patch.setattr("groupwise.build.verify", lambda *_, **__: 0.0)
        yield
    _SEEN.add(kind)
