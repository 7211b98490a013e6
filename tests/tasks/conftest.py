"""What tests of tasks share."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

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


@pytest.fixture
def write_learned_text() -> Callable:
    """Train a task on its one example until it writes that example's target; its metrics then."""

    def write(task) -> dict[str, float]:
        source, target = task._data.train[0]
        task._data.test[0] = type(task._data.test[0])(source, (target,))
        optimizer = torch.optim.Adam(task.model.parameters(), lr=0.01)
        for _ in range(60):
            optimizer.zero_grad()
            task.losses_of([0]).sum().backward()
            optimizer.step()
        found = task.evaluate("test", 50, limit=1, final=True)
        assert task.outputs()["test"][0]["output"] == target
        return found

    return write
