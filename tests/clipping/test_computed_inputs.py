"""Clipping is exact for layers whose inputs are computed from the batch without gradients, or in other layouts."""

import pytest
import torch
from torch import Tensor, nn

from groupwise.clipping import shared_parameters
from tests.clipping.alone import assert_exact
from tests.clipping.conftest import Lambda
from tests.clipping.modes import FEW, attached
from tests.clipping.test_per_example import of_rows

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


def frames(conv, x):
    """Two runs of one convolution over the frames of an example."""
    return conv(conv(x.flatten(0, 1)).tanh()).unflatten(0, x.shape[:2]).square()


def points(layer, x):
    x = x - x.mean(1, keepdim=True)
    return layer(x.reshape(-1, 3)).relu().view(*x.shape[:2], -1).amax(1)


def patches(layer, x):
    return layer(x.unfold(1, 2, 2).unfold(2, 2, 2).reshape(-1, 4)).relu().view(len(x), -1, 4).mean(1)


def pair(layer, x):
    one, two = layer(torch.cat([x, x.flip(1)])).relu().chunk(2)
    return one * two


class FixedBias(nn.Linear):
    """A linear layer whose bias is a property of the class, not a parameter."""

    def __init__(self, p: int, d: int) -> None:
        nn.Module.__init__(self)
        self.weight = nn.Parameter(torch.randn(d, p))

    @property
    def bias(self) -> Tensor:
        return torch.arange(1.0, 1 + len(self.weight))


def with_buffer(layer: nn.Module, name: str) -> nn.Module:
    values = torch.randn_like(getattr(layer, name))
    delattr(layer, name)
    layer.register_buffer(name, values)
    return layer


class Pairs(nn.Module):
    """One norm gets two rows per example (tiled), another one heads with the sequence axis first."""

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
    """Attention with a learned mask, which is added to the scores."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.mask = nn.MultiheadAttention(4, 2, batch_first=True), nn.Parameter(torch.randn(6, 6))

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, attn_mask=self.mask)[0]


class FixedQueries(nn.Module):
    """Attention with queries that all examples share; there are as many positions as examples in two batches."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queries", torch.randn(1, 4, 8))
        self.layer, self.attention = nn.Linear(8, 8), nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        queries = self.layer(self.queries.expand(len(x), -1, -1))
        return self.attention(queries, x, x)[0].square()


def swapped(x: Tensor) -> Tensor:
    """Swap channels and tokens; for one example the strides fit another layout too."""
    return x.transpose(1, 2)


class Squeezed(nn.Module):
    """A batch of one example loses its batch axis."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.layer = nn.Conv1d(2, 3, 2), nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.conv(x.squeeze(0)).tanh().flatten(-2)).view(len(x), 4)


def before_a_head(layer: nn.Module) -> nn.Module:
    return nn.Sequential(layer, nn.Tanh(), nn.Linear(4, 3))


MODELS = {
    "frames of a video, normalised": (lambda: Model(nn.Conv2d(3, 4, 3), video), (5, 3, 6, 6)),
    "points of a set, centred": (lambda: Model(nn.Linear(3, 4), points), (5, 3)),
    "patches": (lambda: Model(nn.Linear(4, 4), patches), (4, 4)),
    "two views": (lambda: Model(nn.Linear(4, 4), pair), (4,)),
    "a column as an index": (lambda: Model(nn.Embedding(9, 4), lambda e, x: e((x[:, 0].abs() * 3).long() % 9)), (4,)),
    "a bias that is a buffer": (lambda: before_a_head(with_buffer(nn.Linear(4, 4), "bias")), (5, 4)),
    "a weight that is a buffer": (lambda: before_a_head(with_buffer(nn.Linear(4, 4), "weight")), (5, 4)),
    "a norm's weight that is a buffer": (lambda: before_a_head(with_buffer(nn.LayerNorm(4), "weight")), (5, 4)),
    "a bias that is a property": (lambda: before_a_head(FixedBias(4, 4)), (5, 4)),
    "norms in two layouts": (Pairs, (6, 4)),
    "a learned mask": (LearnedMask, (6, 4)),
    "shared queries": (FixedQueries, (10, 8)),
    "frames, used twice": (lambda: Model(nn.Conv2d(3, 3, 3, padding=1), frames), (2, 3, 4, 4)),
    "channels become tokens": (
        lambda: nn.Sequential(
            nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4).eval(), nn.Flatten(2), Lambda(swapped), nn.Tanh(), nn.Linear(4, 3)
        ),
        (4, 5, 5),
    ),
    "tokens become an image": (
        lambda: nn.Sequential(nn.Linear(4, 4), Lambda(swapped), nn.Unflatten(2, (3, 3)), nn.GroupNorm(2, 4), nn.Tanh()),
        (9, 4),
    ),
    "a batch axis that is squeezed away": (Squeezed, (2, 5)),
}


@pytest.mark.parametrize("mode", FEW)
@pytest.mark.parametrize("name", MODELS)
def test_outputs_sums_and_norms_match_a_loop_over_examples(monkeypatch, name, mode):
    monkeypatch.setattr(shared_parameters, "CHUNK_FLOATS", 200)  # a few examples at a time
    make, shape = MODELS[name]
    model = make()
    with attached(model, mode, 0.1) as engine:
        for batch in (5, 3, 6, 1, 2, 5):
            x = torch.randn(batch, *shape)
            plain = model(x)
            assert_exact(engine, of_rows(model, x), range(batch), [0.1] * len(engine.groups))
            with engine.forward(batch):
                torch.testing.assert_close(model(x), plain)
