"""Lets the tests import transformers beside a torchvision that was built for another torch."""

from types import SimpleNamespace

import pytest

import groupwise.integrations  # noqa: F401


@pytest.fixture(autouse=True)
def _as_loud_as_before():
    """A trainer with `log_level` sets the level of the library for the whole process."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    yield
    logging.set_verbosity(before)


@pytest.fixture(autouse=True)
def _no_garbage_looked_for(monkeypatch):
    """Every training of a Trainer looks through all that a process holds, once and again, which took most of a test."""
    monkeypatch.setattr("accelerate.utils.memory.gc", SimpleNamespace(collect=lambda: 0))


@pytest.fixture(scope="session")
def whole(tmp_path_factory):
    """The trainer of `tiny`, which has trained all its steps; its folder is as it left it."""
    from tests.integrations.tiny import trainer

    run = trainer(tmp_path_factory.mktemp("whole"))
    run.train()
    return run
