"""Measures the host time of a layer:  python -m benchmarks.host_time turns=9

The layers are so small that almost all of the time is overhead of the host, as on a GPU that waits for its host. Plain
training and both clipping methods take turns in one process. Times are processor times; the ratio is the median over
turns. Operations, views included, are counted by torch's dispatcher, so their number is exact.
"""

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FrameType

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.options import command, option
from groupwise.clipping import attach, flat, per_layer

METHODS = ("none", "per layer", "flat")
CHAINS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(16, 16), (8, 16)),
    "linear on 6 tokens": (lambda: nn.Linear(16, 16), (8, 6, 16)),
    "convolution": (lambda: nn.Conv2d(4, 4, 3, padding=1), (8, 4, 8, 8)),
    "LayerNorm": (lambda: nn.LayerNorm(16), (8, 6, 16)),
    "GroupNorm": (lambda: nn.GroupNorm(2, 4), (8, 4, 8, 8)),
}
"""A layer, and the shape of its input, batch first."""


@dataclass
class Options:
    """The options of the command line."""

    layers: int = option(24, "layers of each chain")
    turns: int = option(25, "timed turns of each method")


@dataclass(frozen=True)
class Cost:
    """The cost of one layer with one method."""

    microseconds: float
    ratio: float
    """Time relative to plain training in the same turn."""
    operations: float


class Counted(TorchDispatchMode):
    """Counts operations while it is active."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.operations += 1
        return function(*args, **(kwargs or {}))


def training(make: Callable[[], nn.Module], shape: Sequence[int], layers: int, method: str) -> Callable[[], None]:
    """A forward and backward pass through a chain of `layers` layers."""
    torch.manual_seed(0)
    model, x = nn.Sequential(*(make() for _ in range(layers))), torch.randn(*shape)
    if method == "none":
        return lambda: model(x).sum().backward()
    engine = attach(model, flat(model) if method == "flat" else per_layer(model), 0.3)
    engine.trace(lambda rows: model(x[list(rows)]).flatten(1).sum(1), range(len(x)))

    def clipped() -> None:
        with engine.forward(len(x)):
            y: Tensor = model(x)
        engine.backward(y.flatten(1).sum(1))
        engine.reset()

    return clipped


def cost(chain: str, options: Options) -> dict[str, Cost]:
    """The cost of a layer of that chain with each method."""
    make, shape = CHAINS[chain]
    passes = {method: training(make, shape, options.layers, method) for method in METHODS}
    operations = {}
    for method, run in passes.items():
        run()  # allocates the gradients
        with Counted() as counted:
            run()
        operations[method] = counted.operations / options.layers
    taken: dict[str, list[float]] = {method: [] for method in METHODS}
    for _ in range(options.turns):
        for method, run in passes.items():
            start = time.process_time()
            for _ in range(4):
                run()
            taken[method].append((time.process_time() - start) / 4 / options.layers * 1e6)
    return {
        method: Cost(
            min(times),
            statistics.median(own / plain for own, plain in zip(times, taken["none"], strict=True)),
            operations[method],
        )
        for method, times in taken.items()
    }


def entered(method: str) -> set[tuple[str, str]]:
    """The functions of groupwise, by file and name, that a pass through one linear layer enters."""
    make, shape = CHAINS["linear"]
    one_pass, found = training(make, shape, 1, method), set[tuple[str, str]]()

    def note(frame: FrameType, event: str, _: object) -> None:
        code, module = frame.f_code, frame.f_globals.get("__name__", "")
        generated = code.co_name.startswith("<") or code.co_filename.startswith("<")  # comprehensions, dataclasses
        if event == "call" and module.startswith("groupwise.") and not generated:
            found.add((code.co_filename, code.co_qualname))

    one_pass()
    sys.setprofile(note)
    one_pass()
    sys.setprofile(None)
    return found


def run(options: Options) -> None:
    """Print a line for each chain, and how many functions a pass through one layer calls."""
    torch.set_num_threads(1)
    heads = f"{'µs':>9s}{'ratio':>7s}{'operations':>12s}"
    print(f"{'':20s}" + "".join(f"{name:>28s}" for name in METHODS) + f"\n{'a layer of':20s}" + heads * len(METHODS))
    for chain in CHAINS:
        costs = cost(chain, options).values()
        print(f"{chain:20s}" + "".join(f"{c.microseconds:9.0f}{c.ratio:7.1f}{c.operations:12.1f}" for c in costs))
    for method in METHODS[1:]:
        functions = entered(method)
        files = {file for file, _ in functions}
        print(f"a pass through one linear layer, {method}: {len(functions)} functions in {len(files)} files")


main = command(Options, run)

if __name__ == "__main__":
    sys.exit(main())
