"""The check before training on texts of unequal length: padding, and losses that depend on the batch."""

import random

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from groupwise.clipping import attach, flat, verify
from groupwise.errors import UserError


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


LENGTHS = (9, 3, 7, 2, 5)


class Encoder(nn.Module):
    """One layer of self-attention over texts, padded with 0, and the mean over positions."""

    def __init__(self, masks: bool, dropout: float) -> None:
        super().__init__()
        self.masks = masks
        self.embed, self.position = nn.Embedding(20, 8), nn.Embedding(9, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=dropout, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        is_padding = tokens == 0
        places = self.position(torch.arange(tokens.shape[1]))
        h = self.layer(self.embed(tokens) + places, src_key_padding_mask=is_padding if self.masks else None)
        kept = (~is_padding).unsqueeze(2)
        return self.head((h * kept).sum(1) / kept.sum(1))


def check(model: nn.Module, loss, divisor=lambda tokens: 1) -> None:
    torch.manual_seed(0)
    texts = [torch.randint(1, 20, (length,)) for length in LENGTHS]
    labels = torch.arange(len(texts)) % 3

    def losses(rows) -> Tensor:
        tokens = nn.utils.rnn.pad_sequence([texts[i] for i in rows], batch_first=True)
        return loss(model(tokens), labels[list(rows)]) / divisor(tokens)

    with attach(model, flat(model), 1.0) as engine:
        verify(engine, losses, range(len(texts)))


def cross_entropy(logits, labels):
    return F.cross_entropy(logits, labels, reduction="none")


def pseudo_labels(logits, labels):
    """Cross-entropy for classes that are drawn from the model's own probabilities."""
    return cross_entropy(logits, torch.multinomial(logits.softmax(1).detach(), 1)[:, 0])


def randomly_weighted(logits, labels):
    return cross_entropy(logits, labels) * torch.empty(len(logits)).log_normal_()


@pytest.mark.parametrize("loss", [cross_entropy, pseudo_labels, randomly_weighted])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_attention_over_padding_is_refused_and_a_mask_passes(dropout, loss):
    check(Encoder(True, dropout), loss)
    with pytest.raises(UserError, match=r"alone but .* in a batch.*mask padding"):
        check(Encoder(False, dropout), loss)


def test_a_head_on_a_frozen_encoder_with_dropout_passes():
    """Without the longest text the encoder draws other masks, and the head sees the same shape."""
    model = Encoder(True, 0.5).requires_grad_(False)
    model.head.requires_grad_()
    check(model, cross_entropy)


@pytest.mark.parametrize("divisor", [len, lambda tokens: (tokens > 0).sum() / len(LENGTHS)])
@pytest.mark.parametrize("loss", [cross_entropy, pseudo_labels, randomly_weighted])
def test_a_loss_divided_by_batch_size_or_token_count_is_refused(loss, divisor):
    with pytest.raises(UserError, match=r"the loss mixes the examples of a batch \(first seen in the losses\)"):
        check(Encoder(True, 0.0), loss, divisor)


def test_random_numbers_that_cannot_be_repeated_give_a_warning():
    def augmented(logits, labels):
        return cross_entropy(logits * torch.tensor([[1 + random.random()] for _ in labels]), labels)

    with pytest.warns(UserWarning, match="by Python or numpy.*make sure that padding is masked"):
        check(Encoder(True, 0.0), augmented)
