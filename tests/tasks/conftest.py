"""What tests of tasks share."""

from pathlib import Path

import pytest

from tests.made_up import made_up_once


@pytest.fixture(scope="module", autouse=True)
def _few_texts():
    """A tenth of the made-up ones, once: nothing here is to be learned from them."""
    with made_up_once(TRAIN=200, VALID=40, REQUESTS=20):
        yield


@pytest.fixture(scope="session")
def folders(tmp_path_factory) -> Path:
    """A folder of `save_pretrained` for each family that is asked for."""
    return tmp_path_factory.mktemp("decoders")
