"""Restores buffers and random generators after passes that only inspect the model."""

import random
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


@contextmanager
def unchanged(model: nn.Module) -> "Iterator[Generators]":
    """Restore buffers and the default generators afterwards; yields these generators."""
    generators = Generators({parameter.device for parameter in model.parameters()})
    with generators.kept(), kept_buffers(model), torch.enable_grad():
        yield generators


MOVED = 0.05
"""Size of the change, relative to a parameter's mean absolute entry plus 1/√n for n entries."""


@contextmanager
def moved_parameters(model: nn.Module, seed: int = 0) -> Iterator[None]:
    """Inside, trainable parameters are changed a little, so that a zero (an initially closed gate, an adapter's second
    factor) does not hide what depends on it. Afterwards they are restored bit for bit. Shards need different seeds."""
    trainable = [getattr(p, "_local_tensor", p.detach()) for p in model.parameters() if p.requires_grad]
    before = [p.detach().clone() for p in trainable]
    generator = torch.Generator().manual_seed(seed)
    try:
        with torch.no_grad():
            for p in trainable:
                size = MOVED * (p.abs().mean() + p.numel() ** -0.5) if p.numel() else 0.0
                p.add_(torch.randn(p.shape, generator=generator, device="cpu").to(p) * size)
        yield
    finally:
        with torch.no_grad():
            for p, value in zip(trainable, before, strict=True):
                p.copy_(value)


@contextmanager
def kept_buffers(model: nn.Module) -> Iterator[None]:
    """Restore the model's buffers afterwards: the same tensors with the same values."""
    before = [
        (module._buffers, name, buffer, buffer.clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffers, name, buffer, value in before:
                buffers[name] = buffer
                if not same_values(buffer, value):
                    buffer.copy_(value)


def same_values(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are equal, with NaN equal to NaN."""
    return a.shape == b.shape and bool(((a == b) | (a != a) & (b != b)).all())


class Generators:
    """The generators of torch (CPU and `devices`), Python's `random` and `numpy.random`, and those given to `add`."""

    def __init__(self, devices: Iterable[torch.device]) -> None:
        cuda = sorted({device.index or 0 for device in devices if device.type == "cuda"})
        self._defaults = [torch.random.default_generator, *(torch.cuda.default_generators[index] for index in cuda)]
        self._others: dict[torch.Generator, Tensor] = {}

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Restore all of them afterwards."""
        back = self.standing()
        try:
            yield
        finally:
            back()
            for generator, state in self._others.items():
                generator.set_state(state)
            self._others.clear()

    def standing(self) -> Callable[[], None]:
        """Save the state of the default generators; returns a function that restores it."""
        recorded = len(self._defaults) > 1 and torch.cuda.is_current_stream_capturing()  # its state cannot be read then
        states = [(generator, generator.get_state()) for generator in self._defaults[: 1 if recorded else None]]
        host = host_states()

        def back() -> None:
            for generator, state in states:
                generator.set_state(state)
            random.setstate(host["random"])
            if "numpy.random" in host:
                sys.modules["numpy"].random.set_state(host["numpy.random"])

        return back

    def add(self, generator: torch.Generator) -> None:
        """Add a generator of the model's own, before its first draw."""
        self._others.setdefault(generator, generator.get_state())

    def seed(self, seed: int) -> None:
        """Seed all of them."""
        self.seed_torch(seed)
        random.seed(seed)
        if "numpy.random" in sys.modules:
            sys.modules["numpy"].random.seed(seed)

    def seed_torch(self, seed: int) -> None:
        """Seed torch's generators."""
        for generator in (*self._defaults, *self._others):
            generator.manual_seed(seed)


def host_states() -> dict[str, tuple[Any, ...]]:
    """The states of Python's and numpy's generators, by module; numpy's only if it has been imported."""
    states: dict[str, tuple[Any, ...]] = {"random": random.getstate()}
    if "numpy.random" in sys.modules:
        name, keys, *rest = sys.modules["numpy"].random.get_state()
        states["numpy.random"] = (name, keys.tolist(), *rest)
    return states
