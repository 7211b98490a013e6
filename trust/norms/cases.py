"""Makes one model for each way that a layer's norm is computed, of about as many parameters as are asked for."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from groupwise.clipping import WSConv2d
from groupwise.clipping.costs import Rates

_KERNEL = Rates(matmul=1e11, gram=1e11, outer=1e3, kernel=1e18, bytes=1e10, calls=1e18)
_UNFOLDING = Rates(matmul=1e11, gram=1e11, outer=1e11, kernel=1e3, bytes=1e10, calls=1e3)
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
        way: what the cost model must choose, where the layer has a choice.
        indices: inputs are indices, as many as the vocabulary has, some of them equal.
        flat: all layers are one group; otherwise there is one layer.
    """

    name: str
    build: Callable[[int], tuple[nn.Module, tuple[int, ...]]]
    entries: tuple[int, ...]
    attach: dict[str, Any] = field(default_factory=dict)
    way: str | None = None
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
    gram, kernel = {"formula": "gram"}, {"formula": "materialize", "rates": _KERNEL}
    unfolding = {"formula": "materialize", "rates": _UNFOLDING}
    found = []
    for kind, close, far in (
        (nn.Conv1d, ((16,), {"padding": 1}), ((24,), {"stride": 3})),
        (nn.Conv2d, ((7, 7), {"padding": 1}), ((8, 8), {"stride": 2, "padding": 1})),
        (nn.Conv3d, ((4, 4, 4), {}), ((4, 4, 4), {"stride": 2})),
    ):
        name, sizes = kind.__name__, (2_000_000, 10_000_000)
        pixels, windows = _conv(kind, close[0], **close[1]), _conv(kind, far[0], **far[1])
        large = _conv(kind, (64,), padding=1) if kind is nn.Conv1d else _conv(kind, (8, 8, 4)[: len(far[0])])
        found += [
            Case(f"{name}: Gram over pixels", pixels, sizes, gram, "gram"),
            Case(f"{name}: Gram over unfolded inputs", windows, sizes, gram, "gram"),
            Case(f"{name}: unfolding", windows, (2_000_000, LARGEST), unfolding, "materialize"),
            Case(f"{name}: kernel", large, sizes, kernel, "materialize/kernel"),
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
        {"formula": "materialize", "rates": _UNFOLDING},
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
