"""Runs the check before training once for each kind of trainer, because it takes longer than a test's steps."""

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from groupwise.clipping import ClippingEngine, verify

_SEEN: set[Hashable] = set()


def only_traced(engine: ClippingEngine, losses: Callable[..., Any], examples: Any, **_: Any) -> float:
    """Replaces `verify`: traces the engine, and compares nothing."""
    engine.trace(losses, examples)
    return 0.0


def verify_once(engine: ClippingEngine, losses: Callable[..., Any], examples: Any, **settings: Any) -> float:
    """`verify`, run once in this process for each combination of losses, model, parameters and clipping mode."""
    shapes = tuple(
        (name, parameter.shape, parameter.requires_grad) for name, parameter in engine.model.named_parameters()
    )
    clipping = engine.norms, engine.partition, engine.groups[0].clip_rule.__qualname__
    kind = type(getattr(losses, "__self__", losses)), type(engine.model), shapes, str(clipping), str(settings)
    if kind in _SEEN:
        return only_traced(engine, losses, examples)
    error = verify(engine, losses, examples, **settings)
    _SEEN.add(kind)
    return error


@pytest.fixture(autouse=True)
def verified_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the tests of a folder whose conftest.py imports this fixture, `verify_once` is the check before training."""
    monkeypatch.setattr("groupwise.build.verify", verify_once)


@contextmanager
def checked_once(kind: Hashable) -> Iterator[None]:
    """Check only the first trainer of each kind in this process; the others would pass as well."""
    with pytest.MonkeyPatch.context() as patch:
        if kind in _SEEN:
            patch.setattr("groupwise.build.verify", only_traced)
        yield
    _SEEN.add(kind)
