"""Lets the tests import transformers beside a torchvision that was built for another torch."""

from types import SimpleNamespace

import pytest

import groupwise.integrations  # noqa: F401


@pytest.fixture(autouse=True)
def _restore_verbosity():
    """A trainer with `log_level` sets the verbosity of transformers for the whole process."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    yield
    logging.set_verbosity(before)


@pytest.fixture(autouse=True)
def _no_garbage_collection(monkeypatch):
    """A Trainer collects garbage several times in each training, which took most of a test's time."""
    monkeypatch.setattr("accelerate.utils.memory.gc", SimpleNamespace(collect=lambda: 0))


@pytest.fixture(scope="session")
def finished(tmp_path_factory):
    """A trainer of `tiny` that has trained all its steps, and its folder."""
    from tests.integrations.tiny import trainer

    run = trainer(tmp_path_factory.mktemp("whole"))
    run.train()
    return run
