"""Makes up a task's texts once a process: for a small model they take longer than its steps."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from groupwise.data import synthetic_text
from groupwise.data.text_examples import Labelled

COUNTS = ("TRAIN", "VALID", "REQUESTS")
MAKERS = {"text_classification": "synthetic_labelled", "text_generation": "synthetic_paired"}


@cache
def _made(make: str, task: str, seed: int, *_counts: int) -> Any:
    return getattr(synthetic_text, make)(task, seed)


def _copy(value: Any) -> Any:
    """Lists of one's own, of the same texts: a test may change what it was given."""
    if isinstance(value, Labelled):
        return Labelled([*value.texts], [*value.labels])
    if isinstance(value, dict):
        return {name: _copy(part) for name, part in value.items()}
    return [*value] if isinstance(value, list) else value


@contextmanager
def made_up_once(**counts: int) -> Iterator[None]:
    """Tasks are given the same texts again; of `counts` (TRAIN, VALID and REQUESTS), where they are named."""
    with pytest.MonkeyPatch.context() as patch:
        for name, count in counts.items():
            patch.setattr(synthetic_text, name, count)
        for module, make in MAKERS.items():

            def again(task: str, seed: int = 0, make: str = make) -> Any:
                made = _made(make, task, seed, *(getattr(synthetic_text, name) for name in COUNTS))
                return replace(made, **{name: _copy(value) for name, value in vars(made).items()})

            patch.setattr(f"groupwise.tasks.{module}.{make}", again)
        yield
