"""Puts buffers and random generators back after passes that only look."""

import random
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


@contextmanager
def unchanged(model: nn.Module) -> "Iterator[Generators]":
    """Afterwards buffers and the default generators, which it yields, are as before."""
    generators = Generators({parameter.device for parameter in model.parameters()})
    with generators.kept(), kept_buffers(model), torch.enable_grad():
        yield generators


MOVED = 0.05
"""Of the mean size of a parameter's numbers, and of 1/√n for n of them: by how much it is moved."""


@contextmanager
def moved_parameters(model: nn.Module) -> Iterator[None]:
    """Inside, trainable parameters differ a little from what they are, so that no zero hides what lies behind it (a
    gate that is shut at first, an adapter's second factor); afterwards they are what they were, to the bit."""
    trainable = [p for p in model.parameters() if p.requires_grad]
    before = [p.detach().clone() for p in trainable]
    generator = torch.Generator().manual_seed(0)
    try:
        with torch.no_grad():
            for p in trainable:
                size = MOVED * (p.abs().mean() + p.numel() ** -0.5) if p.numel() else 0.0
                p.add_(torch.randn(p.shape, generator=generator).to(p) * size)
        yield
    finally:
        with torch.no_grad():
            for p, value in zip(trainable, before, strict=True):
                p.copy_(value)


@contextmanager
def kept_buffers(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Copies of the buffers by name; afterwards the model's own hold the same again."""
    before = [
        (module, local, buffer, f"{name}.{local}" if name else local, buffer.clone())
        for name, module in model.named_modules()
        for local, buffer in module._buffers.items()
        if buffer is not None
    ]
    try:
        yield {name: value for _, _, _, name, value in before}
    finally:
        with torch.no_grad():
            for module, local, buffer, _, value in before:
                module._buffers[local] = buffer
                if not same_values(buffer, value):
                    buffer.copy_(value)


def same_values(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are alike, NaN beside NaN."""
    return a.shape == b.shape and bool(((a == b) | (a != a) & (b != b)).all())


class Generators:
    """Those of torch (on the CPU and on `devices`), Python's `random`, `numpy.random`, and any that `add` names."""

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self._cuda = sorted({device.index or 0 for device in devices if device.type == "cuda"})
        self._others: dict[int, tuple[torch.Generator, torch.Tensor]] = {}

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Afterwards all are as they were."""
        back = self.standing()
        try:
            yield
        finally:
            back()
            for generator, state in self._others.values():
                generator.set_state(state)
            self._others.clear()

    def standing(self) -> Callable[[], None]:
        """Note where the default generators stand; what is returned puts them back there."""
        host, on_cpu = host_states(), torch.get_rng_state()
        recorded = bool(self._cuda) and torch.cuda.is_current_stream_capturing()  # a CUDA graph: nothing may ask then
        on_gpus = {} if recorded else {index: torch.cuda.get_rng_state(index) for index in self._cuda}

        def back() -> None:
            random.setstate(host["random"])
            if (numpy := _numpy()) is not None and "numpy.random" in host:
                numpy.random.set_state(host["numpy.random"])
            torch.set_rng_state(on_cpu)
            for index, state in on_gpus.items():
                torch.cuda.set_rng_state(state, index)

        return back

    def add(self, generator: torch.Generator) -> None:
        """A generator of the model's own, before it is drawn from for the first time."""
        if id(generator) not in self._others:
            self._others[id(generator)] = generator, generator.get_state()

    def seed(self, seed: int) -> None:
        """Seed all of them."""
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
