"""What tests of tasks share."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def folders(tmp_path_factory) -> Path:
    """A folder of `save_pretrained` for each family that is asked for."""
    return tmp_path_factory.mktemp("decoders")
