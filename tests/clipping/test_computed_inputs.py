"""Inputs that a model changes before its first layer, which no gradient marks as the batch's: exact at any batch."""

import pytest
import torch
from torch import Tensor, nn

from groupwise.clipping import attach, flat, per_layer
from tests.clipping.alone import assert_exact

pytestmark = [pytest.mark.usefixtures("double"), pytest.mark.filterwarnings("ignore:groupwise has no rule")]

MODES = {"flat": (flat, {}), "layer": (per_layer, {}), "ghost": (flat, {"norms": "ghost"})}


class Model(nn.Module):
    def __init__(self, first, use) -> None:
        super().__init__()
        self.first, self.head, self.use = first, nn.Linear(4, 3), use

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.use(self.first, x))


def video(conv, x):
    frames = ((x - 0.5) / 0.5).flatten(0, 1)
    return conv(frames).relu().mean((2, 3)).unflatten(0, (len(x), -1)).mean(1)


def points(layer, x):
    x = x - x.mean(1, keepdim=True)
    return layer(x.reshape(-1, 3)).relu().view(*x.shape[:2], -1).amax(1)


def patches(layer, x):
    return layer(x.unfold(1, 2, 2).unfold(2, 2, 2).reshape(-1, 4)).relu().view(len(x), -1, 4).mean(1)


def pair(layer, x):
    one, two = layer(torch.cat([x, x.flip(1)])).relu().chunk(2)
    return one * two


class Matrix(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(4, 4))


MODELS = {
    "frames of a video, normalised": (lambda: nn.Conv2d(3, 4, 3), video, (5, 3, 6, 6)),
    "points of a set, centred": (lambda: nn.Linear(3, 4), points, (5, 3)),
    "patches": (lambda: nn.Linear(4, 4), patches, (4, 4)),
    "two views": (lambda: nn.Linear(4, 4), pair, (4,)),
    "a column as an index": (lambda: nn.Embedding(9, 4), lambda e, x: e((x[:, 0].abs() * 3).long() % 9), (4,)),
    "straight-through rounding": (Matrix, lambda m, x: x @ (m.w + (m.w.round() - m.w).detach()).T, (4,)),
    "a mask of small weights": (Matrix, lambda m, x: x @ (m.w * (m.w.abs() > 0.1)).T, (4,)),
    "a triangle": (Matrix, lambda m, x: x @ (m.w * torch.ones(4, 4).tril()).T, (4,)),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", MODELS)
def test_sums_and_norms_are_those_of_single_examples(name, mode):
    make, use, shape = MODELS[name]
    model, (make_partition, options) = Model(make(), use), MODES[mode]
    partition = make_partition(model)
    bounds = [0.1] * len(partition)

    def losses_of(x: Tensor, rows) -> Tensor:
        return (model(x) * torch.arange(3.0).cos()).sum(1) * (torch.tensor(rows) + 1.0)

    with attach(model, partition, bounds, **options) as engine:
        for batch in (5, 3, 6, 2, 5):
            x = torch.randn(batch, *shape)
            assert_exact(engine, lambda rows, x=x: losses_of(x[list(rows)], rows), range(batch), bounds)
