"""Generates each task's synthetic texts once per process, because that takes longer than a small model's steps."""

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
def _generated(make: str, task: str, *_counts: int) -> Any:
    return getattr(synthetic_text, make)(task)


def _copy(value: Any) -> Any:
    """Copy the lists, but not the texts in them: a test may change the lists."""
    if isinstance(value, Labelled):
        return Labelled([*value.texts], [*value.labels])
    if isinstance(value, dict):
        return {name: _copy(part) for name, part in value.items()}
    return [*value] if isinstance(value, list) else value


@contextmanager
def made_up_once(**counts: int) -> Iterator[None]:
    """Tasks get cached texts; `counts` sets the constants TRAIN, VALID and REQUESTS of `synthetic_text`."""
    with pytest.MonkeyPatch.context() as patch:
        for name, count in counts.items():
            patch.setattr(synthetic_text, name, count)
        for module, make in MAKERS.items():

            def cached(task: str, make: str = make) -> Any:
                texts = _generated(make, task, *(getattr(synthetic_text, name) for name in COUNTS))
                return replace(texts, **{name: _copy(value) for name, value in vars(texts).items()})

            patch.setattr(f"groupwise.tasks.{module}.{make}", cached)
        yield
