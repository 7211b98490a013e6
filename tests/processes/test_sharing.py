"""Two processes of a run on one GPU are refused in a sentence, before NCCL refuses them in its own words."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from groupwise.errors import UserError
from groupwise.processes.distributed import Place, refuse_sharing

CUDA = torch.device("cuda", 0)


def meet(monkeypatch: pytest.MonkeyPatch, gpus: list[str], hosts: list[str]) -> list[str | None]:
    """What each process is told, one after the other: the store has heard of all."""
    store: Any = dist.HashStore()
    for rank, (gpu, host) in enumerate(zip(gpus, hosts, strict=True)):
        store.set(f"gpu of {rank}", f"{host} {gpu}")
    told: list[str | None] = []
    for rank, (gpu, host) in enumerate(zip(gpus, hosts, strict=True)):
        known = SimpleNamespace(name="NVIDIA H100", uuid=gpu)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device, known=known: known)
        monkeypatch.setattr("socket.gethostname", lambda host=host: host)
        try:
            refuse_sharing(store, Place(rank, len(gpus), rank, 1, "env://"), CUDA)
            told.append(None)
        except UserError as error:
            told.append(str(error))
    return told


def test_each_on_its_own_is_well(monkeypatch: pytest.MonkeyPatch) -> None:
    assert meet(monkeypatch, ["a", "b", "a"], ["one", "one", "two"]) == [None] * 3


def test_two_on_one_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, third = meet(monkeypatch, ["a", "b", "a"], ["one"] * 3)
    assert second is None and first == third
    assert first is not None and first.startswith("processes 0 and 2 of this run would share one NVIDIA H100, and each")
