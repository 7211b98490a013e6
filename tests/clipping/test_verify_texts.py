"""The check before training on texts: padding, lengths, losses by the batch, and axes as long as the batch."""

import random
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from groupwise.clipping import attach, flat, per_layer, verify
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


LENGTHS = (9, 3, 7, 2, 5)


class Encoder(nn.Module):
    """One layer of self-attention over texts, padded with 0, and the mean over positions."""

    def __init__(self, masks: bool, dropout: float) -> None:
        super().__init__()
        self.masks = masks
        self.embed = nn.Embedding(20, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=dropout, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        absent = tokens == 0
        h = self.layer(self.embed(tokens), src_key_padding_mask=absent if self.masks else None)
        kept = (~absent).unsqueeze(2)
        return self.head((h * kept).sum(1) / kept.sum(1))


def check(model: nn.Module, loss) -> None:
    torch.manual_seed(0)
    texts = [torch.randint(1, 20, (length,)) for length in LENGTHS]
    labels = torch.arange(len(texts)) % 3

    def losses(rows) -> Tensor:
        tokens = nn.utils.rnn.pad_sequence([texts[i] for i in rows], batch_first=True)
        return loss(model(tokens), labels[list(rows)])

    with attach(model, flat(model), 1.0) as engine:
        verify(engine, losses, range(len(texts)))


def cross_entropy(logits, labels):
    return F.cross_entropy(logits, labels, reduction="none")


def pseudo_labels(logits, labels):
    """Classes that are drawn from the model's own probabilities."""
    return cross_entropy(logits, torch.multinomial(logits.softmax(1).detach(), 1)[:, 0])


def weighed(logits, labels):
    return cross_entropy(logits, labels) * torch.empty(len(logits)).log_normal_()


@pytest.mark.parametrize("loss", [cross_entropy, pseudo_labels, weighed])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_attention_over_padding_is_refused_and_a_mask_passes(dropout, loss):
    check(Encoder(True, dropout), loss)
    with pytest.raises(UserError, match=r"alone but .* in a batch.*mask padding"):
        check(Encoder(False, dropout), loss)


@pytest.mark.parametrize("loss", [cross_entropy, pseudo_labels, weighed])
def test_a_loss_by_the_size_of_the_batch_is_refused(loss):
    with pytest.raises(UserError, match=r"alone but .* in a batch"):
        check(Encoder(True, 0.0), lambda logits, labels: loss(logits, labels) / len(logits))


def test_numbers_that_cannot_be_repeated_for_an_example_alone_are_warned_of():
    def augmented(logits, labels):
        return cross_entropy(logits * torch.tensor([[1 + random.random()] for _ in labels]), labels)

    with pytest.warns(UserWarning, match="by Python or numpy.*make sure that padding is masked"):
        check(Encoder(True, 0.0), augmented)
