"""Times every layer of a workload by itself, plain and clipped, and what a step takes outside of them.

A layer runs apart on the input that it has in the model, with a random gradient of its output, so that its clipping is
all that differs; of small layers several run side by side, so that what a step costs once does not count for each.
Layers of one kind and size are timed once. CPU time; on a GPU, between two of its events.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.meters import Stopwatch, count_operations, floor
from benchmarks.methods import Method, Ours, make
from benchmarks.workloads import Workload

LEAST_MS = 30.0
"""What one turn takes at least, so that neither the clock's ticks nor what a step costs once matter..."""
MOST_COPIES = 8
"""... by so many copies of a layer at most, and then by more steps."""


@dataclass(frozen=True)
class Cost:
    """Milliseconds a step of all layers of one kind and size, or of another part of it.

    Attributes:
        count: how many layers; 0 for another part.
        floor: what the operations counted would allow; the plain time, where none are.
    """

    name: str
    count: int
    plain: float
    private: float
    floor: float


@dataclass(frozen=True)
class Costs:
    """Of a workload in one mode.

    Attributes:
        layers: those that cost most beyond their floor first.
        step: forward, backward and thresholds, of the whole model.
        once: what comes once a logical batch; the first line is of the step, the others follow it.
    """

    layers: list[Cost]
    step: Cost
    once: list[Cost]

    @property
    def outside(self) -> Cost:
        """A step but for its layers: activations, attention, losses, counts; small differences of large numbers."""
        plain, private = self.step.plain, self.step.private
        for layer in self.layers:
            plain, private = plain - layer.plain, private - layer.private
        return Cost("outside the layers", 0, plain, private, plain)


def costs(again: Callable[[], Workload], method: str, rounds: int, device: str) -> Costs:
    """Time the layers of a workload and its whole step, without privacy and by a method.

    Args:
        again: makes the workload again, since a model serves one method only.
        method: a way of ours, of `methods.METHODS`.
        rounds: turns of plain and private, of which the medians are taken.
        device: where it runs.
    """
    layers = [_layer_cost(layer, method, rounds, device) for layer in _layers(again())]
    plain, private = make("none", workload := again()), make(method, again())
    assert isinstance(private, Ours)
    step = Cost("a step", 0, *_turns(plain, private, rounds, device))
    update = torch.optim.AdamW(workload.trainable, foreach=True)
    ends, noise, moved = list[float](), list[float](), list[float]()
    for _ in range(rounds):
        private.clear()
        private.begin()
        private.work()
        ends.append(_milliseconds(private.end, 1, device))
        noise.append(_milliseconds(private.noise, 1, device))
        plain.step()
        moved.append(_milliseconds(update.step, 1, device))
    once = [
        Cost("of it: counts and thresholds", 0, 0.0, median(ends), 0.0),
        Cost("noise and division by B", 0, 0.0, median(noise), 0.0),
        Cost("optimiser (AdamW)", 0, *[median(moved)] * 3),
    ]
    return Costs(sorted(layers, key=lambda cost: cost.floor - cost.private), step, once)


@dataclass
class _Layer:
    """A layer as it was met in the model, and how often its like was."""

    module: nn.Module
    inputs: tuple[Any, ...]
    settings: Mapping[str, Any]
    shape: torch.Size
    batch: int
    count: int = 0

    def __str__(self) -> str:
        shapes = ["×".join(map(str, p.shape)) for p in self.module.parameters(recurse=False) if p.dim() > 1]
        sizes = ["×".join(map(str, x.shape)) for x in self.inputs if torch.is_tensor(x)]
        return " ".join([type(self.module).__name__, *shapes, "on", *sizes])

    def alone(self, method: str, copies: int) -> Method:
        """So many copies of the layer side by side under a method, as a workload of its own."""
        modules = nn.ModuleList(deepcopy(self.module) for _ in range(copies))
        gradient = torch.randn(self.batch, *self.shape[1:], device=next(modules.parameters()).device)
        if len(self.shape) == 4 and not self.inputs[0].is_contiguous():
            gradient = gradient.contiguous(memory_format=torch.channels_last)

        def losses(module: nn.Module, rows: Sequence[int] | None) -> Tensor:
            given = [self._some(x, rows) for x in self.inputs]
            inputs = [x.detach().requires_grad_(x.requires_grad) if torch.is_tensor(x) else x for x in given]
            return (module(*inputs, **self.settings) * self._some(gradient, rows)).flatten(1).sum(1)

        def total(rows: Sequence[int] | None) -> Tensor:
            return torch.stack([losses(module, rows) for module in modules]).sum(0)

        return make(method, Workload(str(self), modules, total, self.batch, None, False))

    def _some(self, x: Any, rows: Sequence[int] | None) -> Any:
        """These examples' part of an input, or the whole where all share it."""
        return x if rows is None or not torch.is_tensor(x) or len(x) != self.batch else x[list(rows)]


def _layers(workload: Workload) -> list[_Layer]:
    """Run the model once and return its layers that train, one of each kind and size."""
    seen: dict[tuple[Any, ...], _Layer] = {}

    def meet(module: nn.Module, inputs: tuple[Any, ...], settings: Mapping[str, Any], output: Tensor) -> None:
        own = [(p.shape, p.requires_grad) for p in module.parameters(recurse=False)]
        given = [(x.shape, x.stride(), x.requires_grad) for x in inputs if torch.is_tensor(x)]
        key = (type(module), str(module), tuple(own), tuple(given))
        if key not in seen:
            kept = [x.detach().clone().requires_grad_(x.requires_grad) if torch.is_tensor(x) else x for x in inputs]
            seen[key] = _Layer(module, tuple(kept), settings, output.shape, workload.batch)
        seen[key].count += 1

    with ExitStack() as hooks:
        for module in workload.model.modules():
            if any(parameter.requires_grad for parameter in module.parameters(recurse=False)):
                hooks.callback(module.register_forward_hook(meet, with_kwargs=True).remove)
        workload.loss()
    return list(seen.values())


def _layer_cost(layer: _Layer, method: str, rounds: int, device: str) -> Cost:
    once = layer.alone("none", 1)
    once.step()
    copies = max(1, min(MOST_COPIES, round(LEAST_MS / max(_milliseconds(once.step, 1, device), 0.01))))
    taken = _turns(layer.alone("none", copies), layer.alone(method, copies), rounds, device)
    return Cost(str(layer), layer.count, *(ms * layer.count / copies for ms in taken))


def _turns(plain: Method, private: Method, rounds: int, device: str) -> tuple[float, float, float]:
    """Milliseconds a step, plain, private and what operations allow; the first two are medians over turns."""
    ways = (plain, private)
    for way in ways:
        way.step()  # the first step of ours looks at the model, too
    operations = [count_operations(way.step) for way in ways]
    steps = max(1, round(LEAST_MS / max(_milliseconds(plain.step, 1, device), 0.01)))
    taken = [[_milliseconds(way.step, steps, device) for way in ways] for _ in range(rounds)]
    ms, clipped = map(median, zip(*taken, strict=True))
    return ms, clipped, ms / (floor(*operations) or 1.0)


def _milliseconds(step: Callable[[], None], steps: int, device: str) -> float:
    watch = Stopwatch(device)
    for _ in range(steps):
        step()
    seconds = watch.read(steps)
    return 1e3 * (seconds.wall if device == "cuda" else seconds.cpu)
