"""Recurrent networks of torch.nn, on padded and packed sequences."""

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from trust.models.architecture import Architecture, Size, each_token
from trust.models.plain_layers import net, words

Recurrent = type[nn.LSTM] | type[nn.GRU] | type[nn.RNN]


class Reader(nn.Module):
    """An embedding, a recurrent network, and a linear layer on the output at the last token.

    Args:
        packed: the network gets packed sequences. first: the batch is the first axis of its input.
    """

    def __init__(self, size: Size, kind: Recurrent, layers: int, both: bool, first: bool, packed: bool) -> None:
        super().__init__()
        self.words = nn.Embedding(size.vocabulary, size.width)
        self.network = kind(
            size.width,
            size.width,
            layers,
            batch_first=first,
            bidirectional=both,
            dropout=size.dropout if layers > 1 else 0.0,
        )
        self.head = nn.Linear(size.width * (1 + both), 3)
        self.first, self.packed = first, packed

    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        x = self.words(ids if self.first else ids.T)
        if self.packed:
            given = pack_padded_sequence(x, lengths, batch_first=self.first, enforce_sorted=False)
            y, _ = pad_packed_sequence(self.network(given)[0], batch_first=self.first, total_length=ids.shape[1])
        else:
            y, _ = self.network(x)
        y = y if self.first else y.transpose(0, 1)
        return self.head(y[torch.arange(len(y)), lengths - 1])


def reader(
    name: str, kind: Recurrent, layers: int = 1, both: bool = False, first: bool = True, packed: bool = False
) -> Architecture:
    """One architecture of the table."""
    model = lambda size: Reader(size, kind, layers, both, first, packed)  # noqa: E731
    return net(name, model, lambda size: {"ids": size.ids(), "lengths": size.lengths})


class Translator(nn.Module):
    """An encoder LSTM and a decoder LSTM that starts from its last state; both embeddings and the head are tied."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.words = nn.Embedding(size.vocabulary, size.width)
        self.reads, self.writes = (nn.LSTM(size.width, size.width, batch_first=True) for _ in range(2))
        self.head = nn.Linear(size.width, size.vocabulary, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids: Tensor, target: Tensor) -> Tensor:
        _, state = self.reads(self.words(ids))
        return self.head(self.writes(self.words(target), state)[0])


RECURRENT = (
    reader("LSTM", nn.LSTM),
    reader("LSTM, 2 layers, both directions", nn.LSTM, 2, both=True),
    reader("LSTM, time first", nn.LSTM, first=False),
    reader("LSTM, packed", nn.LSTM, packed=True),
    reader("LSTM, packed, time first, 2 layers, both directions", nn.LSTM, 2, both=True, first=False, packed=True),
    reader("GRU", nn.GRU),
    reader("GRU, 2 layers, both directions, time first", nn.GRU, 2, both=True, first=False),
    reader("GRU, packed", nn.GRU, packed=True),
    reader("RNN", nn.RNN),
    reader("RNN, 2 layers, both directions, packed", nn.RNN, 2, both=True, packed=True),
    net("LSTM to LSTM, tied words", Translator, lambda s: {"source": s.ids(), **words(s)}, each_token),
)
