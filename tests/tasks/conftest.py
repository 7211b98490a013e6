"""Fixtures of the tests of tasks."""

from pathlib import Path

import pytest

from tests.made_up import made_up_once


@pytest.fixture(scope="module", autouse=True)
def _few_texts():
    """Use a tenth of the synthetic texts, generated once, as no test trains to a result."""
    with made_up_once(TRAIN=200, VALID=40, REQUESTS=20):
        yield


@pytest.fixture(scope="session")
def folders(tmp_path_factory) -> Path:
    """The folder for the saved models of the families."""
    return tmp_path_factory.mktemp("decoders")
