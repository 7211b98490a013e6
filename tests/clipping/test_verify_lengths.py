"""The check before training on texts of several lengths, and where other axes are as long as the batch."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from groupwise.clipping import attach, per_layer, verify
from groupwise.errors import UserError

EXAMPLES = [0, 3, 5, 2, 7]


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


class Tokens(nn.Module):
    """Scores each token, (B, T) -> (B, T); with `sequence_first`, its layers get (T, B, d)."""

    def __init__(self, sequence_first: bool = False) -> None:
        super().__init__()
        self.embed, self.head, self.sequence_first = nn.Embedding(9, 4), nn.Linear(4, 1), sequence_first

    def forward(self, ids: Tensor) -> Tensor:
        x = torch.tanh(self.embed(ids))
        return self.head(x.transpose(0, 1)).transpose(0, 1)[..., 0] if self.sequence_first else self.head(x)[..., 0]


def on_tokens(model: nn.Module, lengths: list[int], normalise: Callable[[Tensor], Tensor]):
    """Squares of the scores, summed over each row's tokens and divided by what `normalise` makes of the mask."""
    rows = [torch.randint(1, 9, (length,)) for length in lengths]

    def losses(examples):
        ids = nn.utils.rnn.pad_sequence([rows[i] for i in examples], batch_first=True)
        return ((model(ids) - 1).square() * (ids > 0)).sum(1) / normalise(ids > 0)

    return attach(model, per_layer(model), 0.05), losses


@pytest.mark.parametrize("lengths", [[7, 2, 5, 3, 4], [4] * 5])
def test_a_loss_normalised_by_the_tokens_of_the_batch_is_found(lengths):
    engine, losses = on_tokens(Tokens(), lengths, lambda mask: mask.sum(1))
    verify(engine, losses, range(5))
    engine, losses = on_tokens(Tokens(), lengths, lambda mask: mask.sum() / 5)
    with pytest.raises(UserError, match="the loss mixes the examples of a batch"):
        verify(engine, losses, range(5))


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5])
def test_a_sequence_as_long_as_the_batch_is_told_from_it(length):
    """The head sees sequences first, of as many steps as there are examples."""
    engine, losses = on_tokens(Tokens(sequence_first=True), [length] * 5, lambda mask: mask.sum(1))
    assert verify(engine, losses, range(5)) < 1e-3


class Positions(nn.Module):
    """Biases for pairs of positions, from a layer on a grid (T, T, 1) that holds no batch."""

    def __init__(self):
        super().__init__()
        self.bias = nn.Sequential(nn.Linear(1, 4), nn.ReLU(), nn.Linear(4, 2, bias=False))
        self.embed, self.head = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        at = torch.arange(float(x.shape[1]))
        q = self.embed(x).unflatten(2, (2, 4)).transpose(1, 2)
        weights = q @ q.mT + self.bias((at[:, None] - at)[..., None]).permute(2, 0, 1)
        return self.head((weights.softmax(-1) @ q).transpose(1, 2).flatten(2).mean(1))


@pytest.mark.parametrize(  # 5 rows are tried, then 3
    "length", [3, 4, 5, *(pytest.param(length, marks=pytest.mark.slow) for length in (2, 6))]
)
def test_positions_as_many_as_the_examples_that_are_tried_are_told_from_them(length):
    model, x = Positions(), torch.randn(8, length, 4)
    with attach(model, per_layer(model), 0.05) as engine:
        assert verify(engine, lambda examples: model(x[list(examples)]).square().sum(1), EXAMPLES) < 1e-3
