"""Measures how far norms are under-stated, and a clipped example exceeds its threshold: `python -m trust.norms`.

For every way to a norm (`CASES`) one example's inputs and output gradients are drawn from laws that are
hard on sums. The norm that the engine states, and the length of what it adds to `.grad`, are compared with the norm of
the float64 gradient. Exit code 1 where a norm is under-stated, or a threshold exceeded, by more than 1e-6 of it.
"""

import argparse
import copy
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from groupwise.atomic import write_text
from groupwise.clipping import WSConv2d, attach, flat, per_layer
from groupwise.rows import csv_text

LARGEST = 100_000_000
_TAPS = {nn.Conv1d: 3, nn.Conv2d: 9, nn.Conv3d: 8, nn.ConvTranspose2d: 9}


@dataclass(frozen=True)
class Case:
    """A way to a norm.

    Args:
        name: as the table has it.
        build: number of parameters -> (model, shape of one example's input).
        entries: numbers of parameters, the table's rows.
        attach: what `attach` is told besides.
        method: what must be chosen, where the layer has a choice.
        indices: inputs are indices, as many as the vocabulary has, some of them equal.
        flat: all layers are one group; otherwise there is one layer.
    """

    name: str
    build: Callable[[int], tuple[nn.Module, tuple[int, ...]]]
    entries: tuple[int, ...]
    attach: dict[str, Any] = field(default_factory=dict)
    method: str | None = None
    indices: bool = False
    flat: bool = False


class Twice(nn.Module):
    """The sum of two uses of one layer: at the first half of the positions, and at the second."""

    def __init__(self, layer: nn.Module, axis: int) -> None:
        super().__init__()
        self.layer, self.axis = layer, axis

    def forward(self, x: Tensor) -> Tensor:
        first, second = x.chunk(2, self.axis)
        return self.layer(first) + self.layer(second)


class Branches(nn.Module):
    """Many layers side by side, each on its own part of the input."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([layer(part) for layer, part in zip(self.layers, x.unbind(1), strict=True)], 1)


class Scale(nn.Module):
    """A parameter that no rule knows."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


def _linear(positions: int) -> Callable[[int], tuple[nn.Module, tuple[int, ...]]]:
    def build(entries: int) -> tuple[nn.Module, tuple[int, ...]]:
        width = int(entries**0.5)
        return nn.Linear(width, width), (positions, width) if positions > 1 else (width,)

    return build


def _long_rows(entries: int) -> tuple[nn.Module, tuple[int, ...]]:
    """Few outputs and long inputs: sums of many products."""
    return nn.Linear(entries // 64, 64), (4, entries // 64)


def _conv(kind: Any, space: tuple[int, ...], **options: Any) -> Callable[[int], tuple[nn.Module, tuple[int, ...]]]:
    def build(entries: int) -> tuple[nn.Module, tuple[int, ...]]:
        channels = int((entries / _TAPS.get(kind, 9)) ** 0.5)
        return kind(channels, channels, 2 if kind is nn.Conv3d else 3, **options), (channels, *space)

    return build


def _branches(entries: int) -> tuple[nn.Module, tuple[int, ...]]:
    width = int((entries / 300) ** 0.5)
    return Branches([nn.Linear(width, width) for _ in range(300)]), (300, 4, width)


def _twice_linear(entries: int) -> tuple[nn.Module, tuple[int, ...]]:
    width = int(entries**0.5)
    return Twice(nn.Linear(width, width), 1), (8, width)


def _twice_conv(entries: int) -> tuple[nn.Module, tuple[int, ...]]:
    channels = int((entries / 9) ** 0.5)
    return Twice(nn.Conv2d(channels, channels, 3, padding=1), 2), (channels, 8, 4)


def _convolutions() -> list[Case]:
    gram, formed = {"formula": "gram"}, {"formula": "materialize"}
    found = []
    for kind, close, far in (
        (nn.Conv1d, ((16,), {"padding": 1}), ((24,), {"stride": 3})),
        (nn.Conv2d, ((7, 7), {"padding": 1}), ((8, 8), {"stride": 2, "padding": 1})),
        (nn.Conv3d, ((4, 4, 4), {}), ((4, 4, 4), {"stride": 2})),
    ):
        name, sizes = kind.__name__, (2_000_000, 10_000_000)
        padded, strided = _conv(kind, close[0], **close[1]), _conv(kind, far[0], **far[1])
        found += [
            Case(f"{name}: Gram", padded, sizes, gram, "gram"),
            Case(f"{name}: Gram, with a stride", strided, sizes, gram, "gram"),
            Case(f"{name}: gradients", strided, (2_000_000, LARGEST), formed, "materialize"),
        ]
    return found


CASES: tuple[Case, ...] = (
    Case("Linear: one position", _linear(1), (2_000_000, LARGEST)),
    Case("Linear: Gram", _linear(16), (2_000_000, LARGEST), {"formula": "gram"}, "gram"),
    Case("Linear: Gram of long rows", _long_rows, (2_000_000, 10_000_000), {"formula": "gram"}, "gram"),
    Case("Linear: Gram of many positions", _linear(1024), (2_000_000,), {"formula": "gram"}, "gram"),
    Case("Linear: gradients", _linear(2), (2_000_000, LARGEST), {"formula": "materialize"}, "materialize"),
    Case("Linear: gradients, kept or made again", _branches, (2_000_000,), {"formula": "materialize"}, flat=True),
    *_convolutions(),
    Case(
        "WSConv2d: Gram",
        _conv(WSConv2d, (4, 4), padding=1, gain=True),
        (2_000_000, 10_000_000),
        {"formula": "gram"},
        "gram",
    ),
    Case(
        "WSConv2d: gradients",
        _conv(WSConv2d, (4, 4), padding=1, gain=True),
        (2_000_000, 10_000_000),
        {"formula": "materialize"},
        "materialize",
    ),
    Case("Embedding", lambda n: (nn.Embedding(n // 500, 500), (n // 500,)), (2_000_000, LARGEST), indices=True),
    Case("LayerNorm", lambda n: (nn.LayerNorm(n // 2), (n // 2,)), (2_000_000, 10_000_000)),
    Case("GroupNorm", lambda n: (nn.GroupNorm(8, n // 16 * 8), (n // 16 * 8, 2)), (2_000_000, 10_000_000)),
    Case("RMSNorm", lambda n: (nn.RMSNorm(n, eps=1e-6), (n,)), (2_000_000, 20_000_000)),
    Case("InstanceNorm", lambda n: (nn.InstanceNorm1d(n // 2, affine=True), (n // 2, 4)), (2_000_000, 10_000_000)),
    Case("ConvTranspose2d", _conv(nn.ConvTranspose2d, (5, 5), stride=2), (2_000_000, 20_000_000)),
    Case("no rule: a copy for each example", lambda n: (Scale(n), (n,)), (2_000_000, LARGEST)),
    Case("shared Linear", _twice_linear, (2_000_000, 10_000_000)),
    Case("shared Conv2d", _twice_conv, (2_000_000, 10_000_000)),
    Case("flat, 300 layers", _branches, (2_000_000, 20_000_000), flat=True),
    Case("ghost, 300 layers", _branches, (2_000_000, 20_000_000), {"norms": "ghost"}, flat=True),
)


RESULT = Path(__file__).resolve().parents[2] / "results" / "trust" / "norms.csv"
ALLOWED = 1e-6
SHARE = 0.37
"""The threshold, as a share of the true norm."""


def _student(shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape) / torch.empty(shape).exponential_().sqrt_()  # so heavy a tail that there is no variance


def _spike(shape: tuple[int, ...]) -> Tensor:
    """One number of 1, and the others so small that all their squares together are as much."""
    numbers = torch.randn(shape)
    numbers *= numbers.numel() ** -0.5
    numbers.view(-1)[numbers.numel() // 3] = 1.0
    return numbers


LAWS: dict[str, Callable[[tuple[int, ...]], Tensor]] = {
    "normal": torch.randn,
    "Student t of 2 degrees": _student,
    "log-normal": lambda shape: torch.randn(shape).mul_(2).exp_(),
    "one spike": _spike,
    "all equal": lambda shape: torch.full(shape, 1.1),
}


@dataclass(frozen=True)
class Row:
    """What was measured of one way and law.

    Args:
        formula: the case's name.
        entries: numbers of the gradient.
        law: of inputs and output gradients.
        understated: (true norm − stated norm)/true norm; below 0 where it was raised.
        over_threshold: (length of what was added to .grad)/C − 1.
    """

    formula: str
    entries: int
    law: str
    understated: float
    over_threshold: float

    @property
    def good(self) -> bool:
        """Whether both are within what is allowed."""
        return self.understated <= ALLOWED and self.over_threshold <= ALLOWED


def measure(case: Case, law: str, entries: int, seed: int = 0) -> Row:
    """One example through the engine, and through float64.

    Raises:
        RuntimeError: the engine went another way than the case is about.
    """
    torch.manual_seed(seed)
    model, shape = case.build(entries)
    draw = LAWS[law]
    inputs = torch.randint(0, shape[0], (1, *shape)) if case.indices else draw((1, *shape))
    with torch.no_grad():
        g = draw(tuple(model(inputs).shape))
    true = _true_norm(model, inputs, g)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "groupwise has no rule")
        engine = attach(model, (flat if case.flat else per_layer)(model), SHARE * true, **case.attach)
    with engine:
        engine.clip(lambda _: (model(inputs) * g).flatten(1).sum(1), [0])
        stated = float(engine.per_example_norms[0, 0])
        added = _length([p.grad for p in model.parameters()])
        methods = engine.groups[0].members[0].context.methods
    chosen = None if methods.last is None else methods[methods.last]
    if case.method is not None and chosen != case.method:
        raise RuntimeError(f"{case.name}: the engine chose {chosen}, not {case.method}")
    count = sum(p.numel() for p in model.parameters())
    return Row(case.name, count, law, 1 - stated / true, added / (SHARE * true) - 1)


def _true_norm(model: nn.Module, inputs: Tensor, g: Tensor) -> float:
    """Of the gradient that plain torch gets in float64."""
    double = copy.deepcopy(model).double()
    outputs = double(inputs.double() if inputs.is_floating_point() else inputs)
    return _length(list(torch.autograd.grad(outputs, list(double.parameters()), g.double())))


def _length(gradients: Sequence[Tensor | None]) -> float:
    """Of all of them together, added up in float64, some numbers at a time."""
    total = 0.0
    for gradient in gradients:
        assert gradient is not None
        for part in gradient.reshape(-1).split(1 << 22):
            total += float(part.double().square_().sum())
    return total**0.5


def as_csv(rows: Sequence[Row]) -> str:
    """The file of the results: what was measured to three digits."""
    told = ((f"{value:.2e}" if isinstance(value, float) else value for value in astuple(row)) for row in rows)
    return csv_text((field.name for field in fields(Row)), told)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and write the table when everything was measured; 1 where a row is not good."""
    names = [case.name for case in CASES]
    parser = argparse.ArgumentParser(prog="python -m trust.norms", description=__doc__.partition("\n\n")[0])
    parser.add_argument("--only", nargs="+", choices=names, metavar="NAME", help=f"some of: {', '.join(names)}")
    parser.add_argument("--most", type=int, help="leave out layers of more parameters than this: a fast look")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    rows: list[Row] = []
    for case in CASES:
        if case.name not in (options.only or names):
            continue
        for entries in case.entries:
            if entries > (options.most or entries):
                continue
            start = time.monotonic()
            for law in LAWS:
                rows.append(measure(case, law, entries))
                print(",".join(f"{v:.2e}" if isinstance(v, float) else str(v) for v in astuple(rows[-1])))
            print(f"{case.name}, {entries}: {time.monotonic() - start:.0f} s", file=sys.stderr)
    if not options.only and options.most is None:
        RESULT.parent.mkdir(parents=True, exist_ok=True)
        write_text(RESULT, as_csv(rows))
    return 0 if all(row.good for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
