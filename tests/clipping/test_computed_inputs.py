"""Layers and parameters that are used in unusual ways, and inputs that no gradient marks as the batch's: exact."""

import pytest
import torch
from torch import Tensor, nn

from groupwise.clipping import shared_parameters
from tests.clipping.alone import assert_exact
from tests.clipping.modes import FEW, attached

pytestmark = [pytest.mark.usefixtures("double"), pytest.mark.filterwarnings("ignore:groupwise has no rule")]


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


class Own(nn.Module):
    """A weight that goes through `made` before it is used."""

    def __init__(self, made) -> None:
        super().__init__()
        self.below, self.weight, self.made = nn.Linear(4, 4), nn.Parameter(torch.rand(4)), made

    def forward(self, x: Tensor) -> Tensor:
        return self.below(x) * self.made(self.weight)


def out_of_place(weight: Tensor) -> Tensor:
    return torch.zeros(2, 4).index_put((torch.tensor([0]),), weight).sum(0)


class FixedBias(nn.Linear):
    """A bias that is no parameter but a property of the class."""

    def __init__(self, p: int, d: int) -> None:
        nn.Module.__init__(self)
        self.weight = nn.Parameter(torch.randn(d, p))

    @property
    def bias(self) -> Tensor:
        return torch.arange(1.0, 1 + len(self.weight))


def by_buffer(layer: nn.Module, name: str) -> nn.Module:
    values = torch.randn_like(getattr(layer, name))
    delattr(layer, name)
    layer.register_buffer(name, values)
    return layer


class Pairs(nn.Module):
    """Two rows of each example, one after the other, through a norm; sequences first with heads through another."""

    def __init__(self) -> None:
        super().__init__()
        self.below, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)
        self.of_heads, self.head = nn.LayerNorm(2), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        below = self.below(x)
        left, right = self.norm(torch.cat([below, below.sin()])).chunk(2)
        heads = self.of_heads((left * right).transpose(0, 1).unflatten(2, (2, 2)))
        return self.head(heads.flatten(2).mean(0))


class LearnedMask(nn.Module):
    """Numbers added to the scores of every head."""

    def __init__(self, by_name: bool) -> None:
        super().__init__()
        self.attention, self.mask = nn.MultiheadAttention(4, 2, batch_first=True), nn.Parameter(torch.randn(6, 6))
        self.by_name = by_name

    def forward(self, x: Tensor) -> Tensor:
        masks = {"attn_mask": self.mask} if self.by_name else {}
        return self.attention(x, x, x, *([] if self.by_name else [None, True, self.mask]), **masks)[0]


class FixedQueries(nn.Module):
    """Queries that all examples share, through a layer, look at positions, as many as two batches have examples."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queries", torch.randn(1, 4, 8))
        self.layer, self.attention = nn.Linear(8, 8), nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        queries = self.layer(self.queries.expand(len(x), -1, -1))
        return self.attention(queries, x, x)[0].square()


class Rest(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.table((x[:, 0] * 9).long() % 7).square()


class Frames(nn.Module):
    """A convolution that runs twice on the frames of an example."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(self.conv(x.flatten(0, 1)).tanh()).unflatten(0, x.shape[:2]).square()


class Turned(nn.Module):
    """Channels become tokens, or tokens channels, whose strides in one example are those of another layout."""

    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2)


class Squeezed(nn.Module):
    """Without its batch axis where there is one example."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.layer = nn.Conv1d(2, 3, 2), nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.conv(x.squeeze(0)).tanh().flatten(-2)).view(len(x), 4)


def under(layer: nn.Module) -> nn.Module:
    return nn.Sequential(layer, nn.Tanh(), nn.Linear(4, 3))


MODELS = {
    "frames of a video, normalised": (lambda: Model(nn.Conv2d(3, 4, 3), video), (5, 3, 6, 6)),
    "points of a set, centred": (lambda: Model(nn.Linear(3, 4), points), (5, 3)),
    "patches": (lambda: Model(nn.Linear(4, 4), patches), (4, 4)),
    "two views": (lambda: Model(nn.Linear(4, 4), pair), (4,)),
    "a column as an index": (lambda: Model(nn.Embedding(9, 4), lambda e, x: e((x[:, 0].abs() * 3).long() % 9)), (4,)),
    "straight-through rounding": (
        lambda: Model(Matrix(), lambda m, x: x @ (m.w + (m.w.round() - m.w).detach()).T),
        (4,),
    ),
    "a mask of small weights": (lambda: Model(Matrix(), lambda m, x: x @ (m.w * (m.w.abs() > 0.1)).T), (4,)),
    "a triangle": (lambda: Model(Matrix(), lambda m, x: x @ (m.w * torch.ones(4, 4).tril()).T), (4,)),
    "a table of what is left of a number, straight to the output": (Rest, (1,)),
    "a weight, times three": (lambda: Own(lambda weight: 3 * weight), (4,)),
    "a weight among zeros": (lambda: Own(out_of_place), (4,)),
    "the sum of a weight": (lambda: Own(lambda weight: weight.sum()), (4,)),
    "a bias that is a buffer": (lambda: under(by_buffer(nn.Linear(4, 4), "bias")), (5, 4)),
    "a weight that is a buffer": (lambda: under(by_buffer(nn.Linear(4, 4), "weight")), (5, 4)),
    "a norm's weight that is a buffer": (lambda: under(by_buffer(nn.LayerNorm(4), "weight")), (5, 4)),
    "a bias that is a property": (lambda: under(FixedBias(4, 4)), (5, 4)),
    "norms of rows in any order": (Pairs, (6, 4)),
    "a mask that is learned": (lambda: LearnedMask(False), (6, 4)),
    "a mask that is learned, by name": (lambda: LearnedMask(True), (6, 4)),
    "queries that all share": (FixedQueries, (10, 8)),
    "frames, twice": (Frames, (2, 3, 4, 4)),
    "channels that become tokens": (
        lambda: nn.Sequential(
            nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4).eval(), nn.Flatten(2), Turned(), nn.Tanh(), nn.Linear(4, 3)
        ),
        (4, 5, 5),
    ),
    "tokens that become an image": (
        lambda: nn.Sequential(nn.Linear(4, 4), Turned(), nn.Unflatten(2, (3, 3)), nn.GroupNorm(2, 4), nn.Tanh()),
        (9, 4),
    ),
    "a batch axis that is squeezed away": (Squeezed, (2, 5)),
}


@pytest.mark.parametrize("mode", FEW)
@pytest.mark.parametrize("name", MODELS)
def test_outputs_sums_and_norms_are_those_of_single_examples(monkeypatch, name, mode):
    monkeypatch.setattr(shared_parameters, "CHUNK_FLOATS", 200)  # a few examples at a time
    make, shape = MODELS[name]
    model = make()

    def losses_of(x: Tensor, rows) -> Tensor:
        out = model(x).flatten(1)
        return (out * torch.arange(float(out.shape[1])).cos()).sum(1) * (torch.tensor(list(rows)) + 1.0)

    with attached(model, mode, 0.1) as engine:
        for batch in (5, 3, 6, 1, 2, 5):
            x = torch.randn(batch, *shape)
            plain = model(x)
            assert_exact(
                engine, lambda rows, x=x: losses_of(x[list(rows)], rows), range(batch), [0.1] * len(engine.groups)
            )
            with engine.forward(batch):
                torch.testing.assert_close(model(x), plain)
