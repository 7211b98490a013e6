"""A plan covers other batch sizes and lengths; calls that it does not cover are traced again or refused."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from groupwise.clipping import attach, flat, per_layer
from groupwise.clipping.clip_plan import Layout, UntracedCall
from tests.clipping.alone import assert_exact
from tests.clipping.test_per_example import of_rows

pytestmark = [pytest.mark.usefixtures("double"), pytest.mark.filterwarnings("ignore:groupwise has no rule")]


class Positions(nn.Module):
    """Positions up to the longest example, shared by all examples, in an embedding and a parameter."""

    def __init__(self):
        super().__init__()
        self.words, self.places, self.scale = nn.Embedding(9, 4), nn.Embedding(40, 4), nn.Parameter(torch.rand(4))

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        rows = torch.arange(ids.shape[1])
        x = self.words(ids) + self.places(rows) + rows.sin()[:, None] * self.scale
        return (x.tanh() * mask[..., None]).sum(1)


def texts(model, lengths, batches=None):
    """Losses of texts of these lengths, padded to the longest of a batch; `batches` records the requested rows."""
    rows = [torch.arange(length) * (i + 2) % 9 for i, length in enumerate(lengths)]

    def losses_of(requested):
        if batches is not None and len(requested) > 1:
            batches.append(list(requested))
        ids = nn.utils.rnn.pad_sequence([rows[i] for i in requested], batch_first=True, padding_value=-1)
        return model(ids.clamp_min(0), ids >= 0).square().sum(1)

    return losses_of


@pytest.mark.parametrize("longest", [0, 7])
def test_lengths_that_were_not_traced_are_exact(longest):
    model = Positions()
    with attach(model, per_layer(model), 0.3) as engine:
        engine.trace(texts(model, [5, 3, 4, 2, 5, 1]), range(6))
        for length in (6, 8, 16, 24, 8):
            lengths = [3] * 8
            lengths[longest] = length
            assert_exact(engine, texts(model, lengths), range(8))


def test_an_unknown_call_is_traced_once_on_all_examples_of_its_batch():
    model, batches = Positions(), []
    with attach(model, flat(model), 0.3) as engine:
        engine.trace(texts(model, [5, 3, 4, 2, 5, 1]), range(6))
        losses_of = texts(model, [2, 2, 8, 1, 2, 2, 2, 2], batches)
        assert_exact(engine, losses_of, range(8))
        assert len(batches) > 2 and all(set(rows) <= set(range(8)) and len(rows) <= 10 for rows in batches)
        batches.clear()
        assert_exact(engine, losses_of, range(8))
        assert batches == [list(range(8))]


def test_an_unknown_call_outside_of_clip_is_refused():
    model = Positions()
    with attach(model, flat(model), 0.3) as engine:
        with pytest.raises(UntracedCall, match=r"Layer 'words'.* trace the model on examples"), engine.forward(3):
            texts(model, [3, 2, 1])(range(3))
        engine.trace(texts(model, [3, 2, 1]), range(3))
        with pytest.raises(UntracedCall, match="Layer 'places'"), engine.forward(6):
            texts(model, [6] * 6)(range(6))
        with engine.forward(4):
            losses = texts(model, [6] * 4)(range(4))
        engine.backward(losses)


class Steps(nn.Module):
    """A cell that runs once per position of the longest example."""

    def __init__(self, cell):
        super().__init__()
        self.cell, self.head = cell, nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = x.new_zeros(len(x), 4)
        for t in range(x.shape[1]):
            h = self.cell(x[:, t], h) if isinstance(self.cell, nn.GRUCell) else self.cell(x[:, t] + h).tanh()
        return self.head(h)


@pytest.mark.parametrize("make", [lambda: nn.GRUCell(4, 4), lambda: nn.Linear(4, 4)])
@pytest.mark.parametrize("make_partition", [flat, per_layer])
def test_more_calls_than_traced_are_traced_again(make, make_partition):
    model = Steps(make())
    with attach(model, make_partition(model), 0.5) as engine:
        engine.trace(of_rows(model, torch.randn(6, 3, 4)), range(6))
        for steps in (2, 5, 3, 5):
            assert_exact(engine, of_rows(model, torch.randn(6, steps, 4)), range(6), [0.5] * len(engine.groups))
        assert max(len(sites) for label, sites in engine.plan.calls.items() if "cell" in label) >= 5
        with pytest.raises(UntracedCall), engine.forward(6):
            of_rows(model, torch.randn(6, 7, 4))(range(6))


class Masked(nn.Module):
    """If an example is padded, a parameter is first multiplied by the mask, then by the examples."""

    def __init__(self):
        super().__init__()
        self.layer, self.scale = nn.Linear(4, 4), nn.Parameter(torch.rand(4))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        h = self.layer(x)
        if not bool(mask.all()):
            h = h + (~mask).to(x.dtype).T[..., None].mul(self.scale).transpose(0, 1)
        return (h.tanh() * self.scale * mask[..., None]).sum(1)


@pytest.mark.parametrize("first", ["padded", "whole"])
def test_both_paths_of_a_model_are_exact_whichever_was_traced(first):
    model = Masked()
    x, whole = torch.randn(8, 8, 4), torch.ones(8, 8, dtype=torch.bool)
    padded = whole.clone()
    padded[6, 5:] = False

    def losses_of(mask, length):
        return lambda rows: model(x[list(rows), :length], mask[list(rows), :length]).square().sum(1)

    with attach(model, flat(model), 1.0) as engine:
        engine.trace(losses_of({"padded": padded, "whole": whole}[first], 8), [6, *range(5)])
        for length in (7, 8):  # at 8 the batch and the sequence are equally long
            for mask, rows in ((whole, 8), (padded, 8), (whole, 4), (padded, 7), (whole, 8), (padded, 8)):
                assert_exact(engine, losses_of(mask, length), range(rows), [1.0])


SOURCES, TARGETS = (9, 3, 5, 4, 6, 2, 7), (2, 8, 3, 5, 4, 6, 3)


class Translator(nn.Module):
    """Reads tokens up to the longest source and the longest target of the batch."""

    def __init__(self):
        super().__init__()
        self.source, self.target, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2, bias=False)

    def forward(self, x: Tensor, sources: Tensor, targets: Tensor) -> Tensor:
        read = self.source(x[:, : int(sources.max())]).tanh()
        read = (read * (torch.arange(read.shape[1]) < sources[:, None])[..., None]).sum(1, keepdim=True)
        written = self.target(x[:, : int(targets.max())])
        written = written * (torch.arange(written.shape[1]) < targets[:, None])[..., None]
        return self.head(written.tanh() * read).sum(1)


def translations(model: Translator):
    x = torch.randn(7, 9, 4)
    sources, targets = torch.tensor(SOURCES), torch.tensor(TARGETS)

    def run(at: Tensor) -> Tensor:
        rows = at[:, 0].long()
        return model(x[rows], sources[rows], targets[rows])

    return of_rows(run, torch.arange(7.0)[:, None])


@pytest.mark.parametrize("order", [range(7), (0, 2, 1, 3, 4, 5, 6), (3, 2, 4, 5, 0, 1)])
def test_two_lengths_are_traced_for_any_order_of_examples(order):
    torch.manual_seed(0)
    model = Translator()
    losses = translations(model)
    with attach(model, flat(model), 1.0) as engine:
        engine.trace(losses, list(order))
        plan = engine.plan
        for rows in ([0, 1, 2], [4, 5, 6, 3], [2], [1, 5]):
            assert_exact(engine, losses, rows)
        assert engine.plan == plan


def test_one_example_alone_needs_no_trace():
    model = Positions()
    with attach(model, per_layer(model), 0.1) as engine:
        assert_exact(engine, texts(model, [4, 9]), [1])
        assert not engine.plan.calls


DRAWS = {
    "dropout": lambda x: F.dropout(x, 0.5),
    "slopes": lambda x: F.rrelu(x, training=True),
    "poisson": lambda x: torch.poisson(x.abs()) + x,
    "gamma": lambda x: torch._standard_gamma(x.abs() + 0.1) + x,
    "binomial": lambda x: torch.binomial(x.detach().abs().ceil(), torch.full_like(x, 0.5)) + x,
    "noise": lambda x: x + torch.randn_like(x),
}


class Random(nn.Module):
    """Random numbers, some of which depend on the values, followed by dropout."""

    def __init__(self, draw):
        super().__init__()
        self.first, self.second, self.draw = nn.Linear(4, 6), nn.Linear(6, 2), draw

    def forward(self, x: Tensor) -> Tensor:
        return self.second(F.dropout(self.draw(self.first(x)), 0.2))


@pytest.mark.parametrize("name", DRAWS)
def test_random_numbers_that_depend_on_values_are_not_taken_for_mixing(name):
    model, x = Random(DRAWS[name]), torch.randn(9, 4)
    with attach(model, flat(model), 1.0) as engine:
        for rows in (range(9), [3, 1], [8, 2, 5, 7, 0]):
            engine.trace(of_rows(model, x), rows)
            engine.clip(of_rows(model, x), rows)
            assert engine.plan.calls["Layer 'second'"][0].layouts == (Layout(),)
