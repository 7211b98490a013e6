"""Keep, seed and compare the generators of random numbers that a forward pass may draw from."""

import random
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


class Generators:
    """Those of torch (on the CPU and on `devices`), Python's `random`, `numpy.random`, and any that `add` names."""

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self._cuda = sorted({device.index or 0 for device in devices if device.type == "cuda"})
        self._others: dict[int, tuple[torch.Generator, torch.Tensor]] = {}

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Afterwards all are as they were."""
        host, numpy = host_states(), _numpy()
        try:
            with torch.random.fork_rng(devices=self._cuda):
                yield
        finally:
            random.setstate(host["random"])
            if numpy is not None and "numpy.random" in host:
                numpy.random.set_state(host["numpy.random"])
            for generator, state in self._others.values():
                generator.set_state(state)
            self._others.clear()

    def add(self, generator: torch.Generator) -> None:
        """A generator of the model's own, before it is drawn from for the first time."""
        if id(generator) not in self._others:
            self._others[id(generator)] = generator, generator.get_state()

    def seed(self, seed: int) -> None:
        """Begin all of them anew."""
        torch.random.default_generator.manual_seed(seed)
        for index in self._cuda:
            torch.cuda.default_generators[index].manual_seed(seed)
        random.seed(seed)
        if (numpy := _numpy()) is not None:
            numpy.random.seed(seed)
        for generator, _ in self._others.values():
            generator.manual_seed(seed)


def host_states() -> dict[str, Any]:
    """Where Python's and numpy's generators stand, by the module that owns them."""
    numpy = _numpy()
    return {"random": random.getstate()} | ({} if numpy is None else {"numpy.random": numpy.random.get_state()})


def moved(before: dict[str, Any], after: dict[str, Any]) -> str | None:
    """The generator of the host that was drawn from in between, by its module's name."""
    return next((name for name, state in after.items() if name in before and not _equal(before[name], state)), None)


def _equal(a: Any, b: Any) -> bool:
    """States are tuples, numpy's with an array inside."""
    return len(a) == len(b) and all(
        bool((x == y).all()) if hasattr(x, "all") else x == y for x, y in zip(a, b, strict=True)
    )


def _numpy() -> Any:
    """numpy, if anybody imported it: nobody draws from it otherwise, and torch alone must do."""
    module = sys.modules.get("numpy")
    return module if hasattr(module, "random") else None
