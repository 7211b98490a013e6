"""Measures by how much norms are under-stated and clipped gradients exceed their thresholds: `python -m trust.norms`.

For each norm formula (`CASES`), the inputs and output gradients of one example are drawn from difficult distributions.
The norm that the engine reports, and the norm of the gradient that it adds to `.grad`, are compared with that of the
float64 gradient. Exit code 1 if a norm is under-stated, or a threshold exceeded, by more than a share of 1e-6.
"""

import argparse
import copy
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from groupwise.atomic import write_text
from groupwise.clipping import WSConv2d, attach, flat, per_layer
from groupwise.rows import csv_text

LARGEST = 100_000_000
SOME, MORE, MOST = (2_000_000, 10_000_000), (2_000_000, 20_000_000), (2_000_000, LARGEST)
ALLOWED = 1e-6
SHARE = 0.37
"""The threshold, as a share of the true norm."""
RESULT = Path(__file__).resolve().parents[2] / "results" / "trust" / "norms.csv"
HEAD = ("formula", "entries", "law", "understated", "over_threshold")
Built = tuple[nn.Module, tuple[int, ...]]
"""A model, and the shape of one example's input."""


@dataclass(frozen=True)
class Case:
    """A layer and a formula for its norm.

    Args:
        build: builds a model of about this number of parameters.
        entries: numbers of parameters, one row of the table each.
        formula: the argument of `attach`, which the layer must use; "" if it has only one.
        norms: the argument of `attach`.
        flat: all layers are one group; otherwise there is one layer.
    """

    build: Callable[[int], Built]
    entries: tuple[int, ...] = SOME
    formula: str = ""
    norms: str = "bookkeeping"
    flat: bool = False


class Twice(nn.Module):
    """The sum of two uses of one layer: at the first half of the positions, and at the second."""

    def __init__(self, layer: nn.Module, axis: int) -> None:
        super().__init__()
        self.layer, self.axis = layer, axis

    def forward(self, x: Tensor) -> Tensor:
        first, second = x.chunk(2, self.axis)
        return self.layer(first) + self.layer(second)


class Branches(nn.ModuleList):
    """Many layers side by side, each on its own part of the input."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([layer(part) for layer, part in zip(self, x.unbind(1), strict=True)], 1)


class Scale(nn.Module):
    """A parameter without a rule."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


def linear(positions: tuple[int, ...], entries: int, twice: bool = False) -> Built:
    """A linear layer with as many outputs as inputs."""
    width = int(entries**0.5)
    layer = nn.Linear(width, width)
    return Twice(layer, 1) if twice else layer, (*positions, width)


def conv(kind: Any, space: tuple[int, ...], entries: int, kernel: int = 3, **options: Any) -> Built:
    """A convolution with as many channels out as in; `twice` splits the first axis of space."""
    twice = options.pop("twice", False)
    channels = int((entries / kernel ** len(space)) ** 0.5)
    layer = kind(channels, channels, kernel, **options)
    return Twice(layer, 2) if twice else layer, (channels, *space)


def branches(entries: int) -> Built:
    """300 parallel linear layers."""
    width = int((entries / 300) ** 0.5)
    return Branches([nn.Linear(width, width) for _ in range(300)]), (300, 4, width)


GRAM, GRADIENTS = "gram", "materialize"
STRIDED = {
    "Conv1d": partial(conv, nn.Conv1d, (24,), stride=3),
    "Conv2d": partial(conv, nn.Conv2d, (8, 8), stride=2, padding=1),
    "Conv3d": partial(conv, nn.Conv3d, (4, 4, 4), kernel=2, stride=2),
}
PADDED = {
    "Conv1d": partial(conv, nn.Conv1d, (16,), padding=1),
    "Conv2d": partial(conv, nn.Conv2d, (7, 7), padding=1),
    "Conv3d": partial(conv, nn.Conv3d, (4, 4, 4), kernel=2),
}
STANDARDISED = partial(conv, WSConv2d, (4, 4), padding=1, gain=True)
CASES: dict[str, Case] = {
    "Linear: one position": Case(partial(linear, ()), MOST),
    "Linear: Gram": Case(partial(linear, (16,)), MOST, GRAM),
    "Linear: Gram of long rows": Case(lambda n: (nn.Linear(n // 64, 64), (4, n // 64)), SOME, GRAM),
    "Linear: Gram of many positions": Case(partial(linear, (1024,)), SOME[:1], GRAM),
    "Linear: gradients": Case(partial(linear, (2,)), MOST, GRADIENTS),
    "Linear: gradients, kept or made again": Case(branches, SOME[:1], formula=GRADIENTS, flat=True),
    **{f"{name}: Gram": Case(build, formula=GRAM) for name, build in PADDED.items()},
    **{f"{name}: Gram, with a stride": Case(build, formula=GRAM) for name, build in STRIDED.items()},
    **{f"{name}: gradients": Case(build, MOST, GRADIENTS) for name, build in STRIDED.items()},
    "WSConv2d: Gram": Case(STANDARDISED, formula=GRAM),
    "WSConv2d: gradients": Case(STANDARDISED, formula=GRADIENTS),
    "Embedding": Case(lambda n: (nn.Embedding(n // 500, 500), (n // 500,)), MOST),
    "LayerNorm": Case(lambda n: (nn.LayerNorm(n // 2), (n // 2,))),
    "GroupNorm": Case(lambda n: (nn.GroupNorm(8, n // 16 * 8), (n // 16 * 8, 2))),
    "RMSNorm": Case(lambda n: (nn.RMSNorm(n, eps=1e-6), (n,)), MORE),
    "InstanceNorm": Case(lambda n: (nn.InstanceNorm1d(n // 2, affine=True), (n // 2, 4))),
    "ConvTranspose2d": Case(partial(conv, nn.ConvTranspose2d, (5, 5), stride=2), MORE),
    "no rule: a copy for each example": Case(lambda n: (Scale(n), (n,)), MOST),
    "shared Linear": Case(partial(linear, (8,), twice=True)),
    "shared Conv2d": Case(partial(conv, nn.Conv2d, (8, 4), padding=1, twice=True)),
    "flat, 300 layers": Case(branches, MORE, flat=True),
    "ghost, 300 layers": Case(branches, MORE, norms="ghost", flat=True),
}


def _spike(shape: tuple[int, ...]) -> Tensor:
    """Random numbers whose squares add up to about 1, except one number that is 1."""
    numbers = torch.randn(shape)
    numbers *= numbers.numel() ** -0.5
    numbers.view(-1)[numbers.numel() // 3] = 1.0
    return numbers


LAWS: dict[str, Callable[[tuple[int, ...]], Tensor]] = {
    "normal": torch.randn,
    "Student t of 2 degrees": lambda shape: torch.randn(shape) / torch.empty(shape).exponential_().sqrt_(),
    "log-normal": lambda shape: torch.randn(shape).mul_(2).exp_(),
    "one spike": _spike,
    "all equal": lambda shape: torch.full(shape, 1.1),
}


@dataclass(frozen=True)
class Row:
    """The errors of one case and distribution: (true norm − reported norm)/true norm, which is below 0 if the norm is
    over-stated, and (norm of the gradient added to .grad)/C − 1."""

    entries: int
    understated: float
    over_threshold: float

    @property
    def good(self) -> bool:
        """Whether both are at most `ALLOWED`."""
        return self.understated <= ALLOWED and self.over_threshold <= ALLOWED


def measure(name: str, law: str, entries: int, seed: int = 0) -> Row:
    """Clip one example with the engine, and compare with its float64 gradient.

    Raises:
        RuntimeError: the engine chose another formula than that of the case.
    """
    torch.manual_seed(seed)
    case, draw = CASES[name], LAWS[law]
    model, shape = case.build(entries)
    indices = isinstance(model, nn.Embedding)
    inputs = torch.randint(0, shape[0], (1, *shape)) if indices else draw((1, *shape))
    with torch.no_grad():
        g = draw(tuple(model(inputs).shape))
    true = _true_norm(model, inputs, g)
    options: dict[str, Any] = {"norms": case.norms, **({"formula": case.formula} if case.formula else {})}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "groupwise has no rule")
        engine = attach(model, (flat if case.flat else per_layer)(model), SHARE * true, **options)
    with engine:
        engine.clip(lambda _: (model(inputs) * g).flatten(1).sum(1), [0])
        reported = float(engine.per_example_norms[0, 0])
        added = _norm([p.grad for p in model.parameters()])
        methods = engine.groups[0].members[0].rule.methods
    chosen = None if methods.last is None else methods.chosen[methods.last]
    if case.formula and chosen != case.formula:
        raise RuntimeError(f"{name}: the engine chose {chosen}, not {case.formula}")
    return Row(sum(p.numel() for p in model.parameters()), 1 - reported / true, added / (SHARE * true) - 1)


def _true_norm(model: nn.Module, inputs: Tensor, g: Tensor) -> float:
    """The norm of the float64 gradient of plain torch."""
    double = copy.deepcopy(model).double()
    outputs = double(inputs.double() if inputs.is_floating_point() else inputs)
    return _norm(list(torch.autograd.grad(outputs, list(double.parameters()), g.double())))


def _norm(gradients: Sequence[Tensor | None]) -> float:
    """The norm of all gradients together, summed in float64 in parts."""
    found = [gradient for gradient in gradients if gradient is not None]
    assert len(found) == len(gradients)
    return sum(float(part.double().square_().sum()) for g in found for part in g.reshape(-1).split(1 << 22)) ** 0.5


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and write the table if all cases were measured; returns 1 if an error is above `ALLOWED`."""
    parser = argparse.ArgumentParser(prog="python -m trust.norms", description=__doc__.partition("\n\n")[0])
    parser.add_argument("--only", nargs="+", choices=CASES, metavar="NAME", help=f"some of: {', '.join(CASES)}")
    parser.add_argument("--most", type=int, help="leave out layers with more parameters than this")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    lines, good = [], True
    for name in options.only or CASES:
        for entries in CASES[name].entries:
            for law in LAWS if entries <= (options.most or entries) else ():
                row = measure(name, law, entries)
                lines.append([name, str(row.entries), law, f"{row.understated:.2e}", f"{row.over_threshold:.2e}"])
                print(",".join(lines[-1]), flush=True)
                good &= row.good
    if not options.only and options.most is None:
        write_text(RESULT, csv_text(HEAD, lines))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
