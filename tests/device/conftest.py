"""The device of the tests marked cuda: a GPU, or the one that GROUPWISE_TEST_DEVICE names (cpu tries the tests)."""

import os
from collections.abc import Iterator

import pytest
import torch

NAMED = os.environ.get("GROUPWISE_TEST_DEVICE")


@pytest.fixture(scope="session")
def device() -> torch.device:
    """The device; skips the test if there is no GPU and no device was named."""
    if NAMED:
        return torch.device(NAMED, torch.cuda.current_device()) if NAMED == "cuda" else torch.device(NAMED)
    if not torch.cuda.is_available():
        pytest.skip("torch sees no GPU; GROUPWISE_TEST_DEVICE=cpu tries these tests on the CPU")
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture(autouse=True)
def _default_dtype() -> Iterator[None]:
    before = torch.get_default_dtype()
    yield
    torch.set_default_dtype(before)
