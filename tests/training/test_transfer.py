"""Tensors are copied to a GPU from pinned memory without waiting, and elsewhere by a plain copy."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from groupwise.data.images import normalize
from groupwise.training.task import row_numbers, to_device

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """The calls of `pin_memory` and `to`, which need no GPU here."""
    done: list[tuple[Any, ...]] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(Tensor, "pin_memory", lambda self: done.append(("pin", self)) or self)
    monkeypatch.setattr(Tensor, "to", lambda self, *args, **options: done.append(("to", *args, options)) or self)
    return done


def test_a_copy_to_a_gpu_is_pinned_and_does_not_wait(calls: list[tuple[Any, ...]]) -> None:
    to_device(torch.arange(3).expand(2, 3), CUDA)  # an expanded tensor cannot be pinned as it is
    (pin, pinned), moved = calls
    assert pin == "pin" and pinned.is_contiguous() and pinned.tolist() == [[0, 1, 2]] * 2
    assert moved == ("to", CUDA, {"non_blocking": True})


def test_values_and_row_numbers_are_unchanged() -> None:
    assert to_device(np.array([1, 2], dtype=np.int32), CPU).tolist() == [1, 2]
    for examples in ([4, 0], range(2), np.array([3, 1], dtype=np.int32), np.arange(6)[::2], []):
        index = row_numbers(examples, CPU)
        assert index.dtype == torch.int64 and index.tolist() == list(examples)


def test_constants_are_copied_to_a_device_once(monkeypatch: pytest.MonkeyPatch) -> None:
    images, mean, std = torch.randint(0, 256, (2, 1, 3, 3), dtype=torch.uint8), (0.123,), (0.456,)
    first = normalize(images, mean, std)
    monkeypatch.setattr(torch, "tensor", None)
    assert torch.equal(normalize(images, mean, std), first)
    torch.testing.assert_close(first, (images / 255 - 0.123) / 0.456)
