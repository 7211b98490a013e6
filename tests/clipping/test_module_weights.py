"""Modules that are re-expressed as linear layers and embeddings match a loop over examples in every mode."""

from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils._pytree import tree_leaves

from groupwise.clipping import attach, flat
from tests.clipping.alone import assert_bounded, assert_exact, looped
from tests.clipping.covering import covering_pairs
from tests.clipping.modes import FEW, attached
from tests.clipping.test_per_example import losses_of
from tests.clipping.traced import clip

pytestmark = [pytest.mark.usefixtures("double"), pytest.mark.filterwarnings("ignore:groupwise has no rule")]

MODES = (*FEW, "block", "gram", "materialized")


class Recurrence(nn.Module):
    """Outputs and last states of equally long or packed sequences, from zero or given initial states."""

    def __init__(self, kind, first: bool = True, packed: bool = False, given: bool = False, **options):
        super().__init__()
        self.body, self.head, self.first = kind(4, 5, batch_first=first, **options), nn.LazyLinear(3), first
        self.packed, self.given = packed, given

    def forward(self, x: Tensor) -> Tensor:
        body, sequences = self.body, x if self.first else x.transpose(0, 1)
        if self.packed:
            lengths = (x[:, 0, 0] > 0).long() * 2 + 2
            sequences = pack_padded_sequence(sequences, lengths, self.first, enforce_sorted=False)
        h = F.pad(x.mean(1), (1, 0)).expand(body.num_layers * (1 + body.bidirectional), -1, -1)
        given = (h, h.sin()) if isinstance(body, nn.LSTM) else h
        y, states = body(sequences, given if self.given else None)
        if self.packed:
            y, _ = pad_packed_sequence(y, self.first, total_length=x.shape[1])
        y = self.head(y if self.first else y.transpose(0, 1)).flatten(1)
        return torch.cat([y, *(state.transpose(0, 1).flatten(1) for state in tree_leaves(states))], 1)


class Cells(nn.Module):
    def __init__(self, kind, given: bool = True, **options):
        super().__init__()
        self.cell, self.given = kind(4, 5, **options), given
        self.start = nn.Parameter(torch.rand(5)) if given else None

    def forward(self, x: Tensor) -> Tensor:
        h = self.start.expand(len(x), -1) if self.given else None
        state = (h, h) if self.given and isinstance(self.cell, nn.LSTMCell) else h
        for t in range(32):
            state = self.cell(x[:, t % x.shape[1]], state)
        return state[0] if isinstance(state, tuple) else state


class SelfAttention(nn.Module):
    def __init__(self, first: bool = True, **options):
        super().__init__()
        self.body, self.first = nn.MultiheadAttention(4, 2, batch_first=first, **options), first
        nn.init.normal_(self.body.out_proj.bias)

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.first else x.transpose(0, 1)
        y = self.body(x, x, x.sin())[0]
        return y if self.first else y.transpose(0, 1)


class EncoderDecoder(nn.Module):
    """A transformer with causal and padding masks, and learned queries."""

    def __init__(self, first: bool, dropout: float = 0.0, queries: int = 2):
        super().__init__()
        options = {"d_model": 4, "nhead": 2, "dim_feedforward": 6, "dropout": dropout, "batch_first": first}
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(**options), 2, enable_nested_tensor=False)
        self.decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(**options), 1)
        self.queries, self.first = nn.Parameter(torch.rand(queries, 4)), first

    def forward(self, x: Tensor) -> Tensor:
        padding = torch.zeros(x.shape[:2], dtype=torch.bool)
        padding[:, -1] = x[:, -1, 0] > 0
        causal = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        queries = self.queries.expand(len(x), -1, -1)
        if not self.first:
            x, queries = x.transpose(0, 1), queries.transpose(0, 1)
        memory = self.encoder(x, mask=causal, src_key_padding_mask=padding)
        y = self.decoder(queries, memory, memory_key_padding_mask=padding)
        return y if self.first else y.transpose(0, 1)


class Bags(nn.Module):
    """Bags of several lengths, filled up with padding; some contain only padding."""

    def __init__(self, mode: str, padding_idx: int = 0):
        super().__init__()
        self.bags, self.head = nn.EmbeddingBag(7, 4, mode=mode, padding_idx=padding_idx), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        ids = (x * 10).abs().long() % 7
        lengths = (x[:, 0, 0] > 0).long() * 4
        absent = torch.arange(16) >= lengths.unsqueeze(1)
        return self.head(self.bags(ids.flatten(1).masked_fill(absent, self.bags.padding_idx)))


class ManyBags(nn.Module):
    """One table: two bags per example, one, one for all, with fixed and learned weights; and as an embedding."""

    def __init__(self, padding_idx: int | None = None):
        super().__init__()
        self.bags, self.words = nn.EmbeddingBag(7, 4, mode="sum", padding_idx=padding_idx), nn.Embedding(7, 4)
        nn.init.normal_(self.bags.weight)  # as after a noisy step, which changes the padding row too
        self.words.weight, self.learned = self.bags.weight, nn.Parameter(torch.rand(4))
        self.register_buffer("same", torch.tensor([[1, 5, 1, 3, 6]]))

    def forward(self, x: Tensor) -> Tensor:
        ids = (x * 10).abs().long() % 7
        pairs = self.bags(ids[:, :2, :2].flatten(0, 1), per_sample_weights=x[:, 2:, :2].cos().flatten(0, 1))
        first = self.bags(ids[:, 0], per_sample_weights=self.learned.expand(len(x), -1))
        return (
            pairs.unflatten(0, (len(x), 2)).sin().sum(1)
            + first
            + self.bags(ids[:, 3, :3].int()) * self.bags(self.same)
            + self.words(ids[:, 1, 0])
        )


class PooledByAttention(nn.Module):
    """Attention as a function, with concatenated biases, as CLIP pools images."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = x.transpose(0, 1)
        pooled, _ = F.multi_head_attention_forward(
            *(x.mean(0, keepdim=True), x, x, 4, 2, None, torch.cat([self.q.bias, self.k.bias, self.v.bias])),
            *(None, None, False, 0.0, self.out.weight, self.out.bias),
            use_separate_proj_weight=True,
            q_proj_weight=self.q.weight,
            k_proj_weight=self.k.weight,
            v_proj_weight=self.v.weight,
            need_weights=False,
        )
        return pooled.squeeze(0)


class LearnedTokens(nn.Module):
    """A layer of tokens that all examples share; its outputs are then combined with the examples."""

    def __init__(self, body):
        super().__init__()
        self.body, self.tokens, self.head = body, nn.Parameter(torch.randn(1, 4, 4)), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(self.body, nn.MultiheadAttention):
            return self.body(self.tokens, self.tokens, self.tokens)[0] * self.head(x)
        tokens = self.tokens if self.body.batch_first else self.tokens.transpose(0, 1)
        y, states = self.body(tokens)
        last = states[0] if isinstance(states, tuple) else states
        return (y if self.body.batch_first else y.transpose(0, 1)) * self.head(x) + last[:, 0]


class UsedTwice(nn.Module):
    """A recurrent weight that is also used in a linear product: one joint norm."""

    def __init__(self):
        super().__init__()
        self.body = nn.GRU(4, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.body(x)[0], self.body.weight_hh_l0[2:6]) * self.body.bias_ih_l0[:4]


MODELS = {
    "one weight used in two ways": UsedTwice,
    "attention of learned tokens": lambda: LearnedTokens(nn.MultiheadAttention(4, 2, batch_first=True)),
    "lstm of learned tokens": lambda: LearnedTokens(nn.LSTM(4, 4, batch_first=True)),
    "gru of learned tokens": lambda: LearnedTokens(nn.GRU(4, 4)),
    "attention as a function": PooledByAttention,
    "lstm": lambda: Recurrence(nn.LSTM, num_layers=2, bidirectional=True, proj_size=3),
    "lstm sequences first": lambda: Recurrence(nn.LSTM, first=False, given=True),
    "lstm packed": lambda: Recurrence(nn.LSTM, packed=True, given=True, num_layers=2, bidirectional=True),
    "gru": lambda: Recurrence(nn.GRU, num_layers=2, bidirectional=True),
    "gru without bias": lambda: Recurrence(nn.GRU, given=True, bias=False),
    "gru packed": lambda: Recurrence(nn.GRU, first=False, packed=True),
    "rnn": lambda: Recurrence(nn.RNN, bias=False),
    "rnn relu": lambda: Recurrence(nn.RNN, packed=True, nonlinearity="relu", num_layers=2, bidirectional=True),
    "lstm cell": lambda: Cells(nn.LSTMCell),
    "gru cell": lambda: Cells(nn.GRUCell),
    "rnn cell": lambda: Cells(nn.RNNCell),
    "lstm cell from zeros": lambda: Cells(nn.LSTMCell, given=False, bias=False),
    "gru cell from zeros": lambda: Cells(nn.GRUCell, given=False, bias=False),
    "rnn cell relu": lambda: Cells(nn.RNNCell, given=False, nonlinearity="relu"),
    "attention": SelfAttention,
    "attention with biases": lambda: SelfAttention(False, add_bias_kv=True, add_zero_attn=True),
    "encoder and decoder": lambda: EncoderDecoder(True),
    "encoder and decoder, sequences first": lambda: EncoderDecoder(False),
    "bags of sums": lambda: Bags("sum", 3),
    "bags of means": lambda: Bags("mean"),
    "bags of maxima": lambda: Bags("max"),
    "many bags of one table": ManyBags,
    "many bags of one table, padded": lambda: ManyBags(3),
}


def make_model(name: str) -> nn.Module:
    model = MODELS[name]()
    model(torch.randn(2, 4, 4))  # lazy layers
    return model


BATCHES = {4: [0, 1, 2, 3], 3: [0, 1, 3], 1: [2]}
"""Batch size -> some of four examples; one batch has as many examples as there are steps."""


@cache
def loop_over(name: str, frozen: bool = False):
    """A model, four examples and the loop over them, cached for all modes and batches."""
    model, x = make_model(name), torch.randn(4, 4, 4)
    for key, parameter in model.named_parameters():
        parameter.requires_grad_(not (frozen and FROZEN[name](key)))
    return model, x, looped(model, lambda i: losses_of(model, x, [i])[0], range(4))


def assert_equal(name: str, mode: str, examples: list[int], frozen: bool = False) -> None:
    model, x, loop = loop_over(name, frozen)
    with attached(model, mode, 0.3) as engine:
        assert_exact(engine, lambda rows: losses_of(model, x, list(rows)), examples, [0.3] * len(engine.groups), loop)


@pytest.mark.parametrize(("name", "mode", "batches"), covering_pairs(MODELS, MODES, list(BATCHES)))
def test_sums_and_norms_match_a_loop_over_examples(name, mode, batches):
    for batch in batches:
        assert_equal(name, mode, BATCHES[batch])


@pytest.mark.parametrize("name", MODELS)
def test_one_trace_is_enough_for_all_batches(name, monkeypatch):
    model = make_model(name)
    with attach(model, flat(model), 1.0) as engine:
        for batch in (5, 5, 4, 7):
            x = torch.randn(batch, 4, 4)
            clip(engine, lambda rows, x=x: losses_of(model, x, list(rows)), range(batch))
            monkeypatch.setattr(engine, "_trace", None)
        assert engine.examples == 21


FROZEN = {
    "lstm": lambda key: "weight" in key,
    "gru": lambda key: "ih" in key,
    "attention": lambda key: "weight" in key,
    "attention with biases": lambda key: "in_proj" in key,
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", FROZEN)
def test_frozen_parameters_get_no_gradient_and_add_to_no_norm(name, mode):
    assert_equal(name, mode, BATCHES[4], frozen=True)


DROPPING = {
    "lstm": lambda: Recurrence(nn.LSTM, num_layers=2, dropout=0.5),
    "attention": lambda: SelfAttention(dropout=0.5),
    "encoder and decoder": lambda: EncoderDecoder(True, dropout=0.5),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", DROPPING)
def test_dropout_leaves_every_example_within_its_threshold(name, mode):
    model = DROPPING[name]().train()
    model(torch.randn(2, 4, 4))
    with attached(model, mode, 0.01) as engine:
        x = torch.randn(4, 4, 4)
        clip(engine, lambda rows: losses_of(model, x, list(rows)), range(4))
        assert engine.nonfinite == 0
        assert_bounded(engine, lambda rows: losses_of(model, x, list(rows)), range(4))


def test_as_many_queries_as_examples_are_not_taken_for_the_batch():
    model = EncoderDecoder(False, queries=3)
    with attach(model, flat(model), 0.3) as engine:
        for x in (torch.randn(4, 4, 4), torch.randn(3, 4, 4)):
            assert_exact(engine, lambda rows, x=x: losses_of(model, x, list(rows)), range(len(x)), [0.3])
