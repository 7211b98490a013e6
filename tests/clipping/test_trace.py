"""Where a layer's input holds the examples, as the trace finds it: sums are exact whatever the layout."""

from itertools import product

import pytest
import torch
from torch import Tensor, nn

from groupwise.clipping import ClippingEngine
from tests.clipping.alone import assert_exact
from tests.clipping.covering import covering_pairs
from tests.clipping.modes import FEW, attached
from tests.clipping.test_per_example import of_rows
from tests.clipping.traced import clip
from tests.combinations import pairs_fast

pytestmark = [pytest.mark.usefixtures("double"), pytest.mark.filterwarnings("ignore:groupwise has no rule")]

ROWS, WIDE = 6, 5


class Two(nn.Module):
    def __init__(self, use):
        super().__init__()
        self.a, self.b, self.use = nn.Linear(5, 5), nn.Linear(5, 5), use

    def forward(self, x: Tensor) -> Tensor:
        return self.use(self.a, self.b, x)


def grid_of(length: int) -> Tensor:
    """Numbers of no example, (length, WIDE)."""
    return torch.arange(1.0, 1 + length).outer(torch.arange(1.0, 1 + WIDE)).sin()


def pairs(a, b, x):
    left, right = a(torch.cat([b(x), x.sin()])).tanh().chunk(2)
    return left * right


def kinds(a, b, rows):
    """As token types of one kind: rows that are all alike."""
    return (a(rows) + b(torch.ones_like(rows))).tanh()


def chain(a, b, x):
    """Layers of what all examples share follow each other."""
    return (x + b(a(a(grid_of(x.shape[1])).tanh()).tanh())).tanh()


LAYOUTS = {
    "plain": lambda a, b, x: b(a(x).tanh()),
    "sequences first": lambda a, b, x: a(b(x.transpose(0, 1)).tanh()).transpose(0, 1),
    "two layouts in one pass": lambda a, b, x: b(a(x)) + a(b(x).transpose(0, 1)).transpose(0, 1),
    "two layouts one after the other": lambda a, b, x: a(b(a(x).transpose(0, 1)).tanh()).transpose(0, 1),
    "batch on the third axis": lambda a, b, x: a(
        b(x).unsqueeze(0).expand(3, -1, -1, -1).transpose(1, 2).tanh()
    ).permute(2, 0, 1, 3),
    "grouped": lambda a, b, x: b(a(x.flatten(0, 1)).tanh()).unflatten(0, (-1, x.shape[1])),
    "tiled": pairs,
    "grouped, with a type for all": lambda a, b, x: kinds(a, b, x.flatten(0, 1)).unflatten(0, (-1, x.shape[1])),
    "tiled, with a type for all": lambda a, b, x: kinds(a, b, torch.cat([x, x.sin()])).unflatten(0, (2, -1)).prod(0),
    "a chain of shared inputs": chain,
}


@pytest.mark.parametrize(("name", "mode", "batches"), covering_pairs(LAYOUTS, FEW, [1, 2, 3, 5, 6]))
def test_layouts_are_exact_whatever_axes_have_the_same_length(name, mode, batches):
    for batch in batches:
        model = Two(LAYOUTS[name])
        with attached(model, mode) as engine:
            assert_exact(engine, of_rows(model, torch.randn(batch, 3, 5)), range(batch))


@pytest.mark.parametrize("name", LAYOUTS)
def test_one_trace_is_enough_for_batches_of_other_sizes_and_three_for_lengths(name, monkeypatch):
    traced, real = [], ClippingEngine._trace
    monkeypatch.setattr(ClippingEngine, "_trace", lambda *given: traced.append(1) or real(*given))
    model = Two(LAYOUTS[name])
    with attached(model, "layer") as engine:
        engine.trace(of_rows(model, torch.randn(6, 3, 5)), range(6))
        for batch in (6, 4, 1, 5, 2):
            assert_exact(engine, of_rows(model, torch.randn(batch, 3, 5)), range(batch))
        assert len(traced) == 1
        for batch, length in ((4, 7), (1, 3), (5, 2), (2, 3), (3, 1), (6, 5), (4, 6)):
            assert_exact(engine, of_rows(model, torch.randn(batch, length, 5)), range(batch))
        assert len(traced) <= 3


class MetTwice(nn.Module):
    """What one layer or parameter does to a number of every example, and to rows that all examples share."""

    def __init__(self, of_examples, of_all):
        super().__init__()
        self.embed, self.layer, self.head = nn.Linear(WIDE, WIDE), nn.Linear(WIDE, WIDE), nn.Linear(WIDE, 2)
        self.scale = nn.Parameter(torch.randn(WIDE))
        self.frozen = nn.Parameter(torch.randn(ROWS, WIDE), requires_grad=False)
        self.of_examples, self.of_all = of_examples, of_all

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        first = self.of_examples(self, x, h)
        return self.head((h.tanh() * self.of_all(self, grid_of(x.shape[1]))).mean(1) + first)


MET_TWICE = {
    "a parameter": (lambda m, x, h: h.mean(1) * m.scale, lambda m, grid: grid * m.scale),
    "a parameter that meets numbers": (lambda m, x, h: x.sin().mean(1) * m.scale, lambda m, grid: grid * m.scale),
    "a parameter that meets a frozen one": (lambda m, x, h: h.mean(1) * m.scale, lambda m, grid: m.frozen * m.scale),
    "a layer": (lambda m, x, h: m.layer(h.mean(1)), lambda m, grid: m.layer(grid)),
    "a layer of numbers": (lambda m, x, h: m.layer(x.sin().mean(1)), lambda m, grid: m.layer(grid)),
    "a layer of a frozen parameter": (lambda m, x, h: m.layer(h.mean(1)), lambda m, grid: m.layer(m.frozen)),
}


@pytest.mark.parametrize(
    ("name", "mode", "batches"),
    pairs_fast(product(MET_TWICE, FEW, [(4, 6, 3, 6), (6, 6, 4, 6), (3, 6, 12), (2, 3, 6)])),
)
def test_what_all_examples_share_is_not_taken_for_the_batch_where_it_is_as_long(name, mode, batches):
    model = MetTwice(*MET_TWICE[name])
    (model.layer if "parameter that" in name or name == "a parameter" else model.scale).requires_grad_(False)  # unused
    with attached(model, mode) as engine:
        for batch in batches:
            assert_exact(
                engine, of_rows(model, torch.randn(batch, ROWS, WIDE)), range(batch), [0.5] * len(engine.groups)
            )


class SequencesFirst(nn.Module):
    """A head that is zero at first, so that no gradient tells anything then."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Linear(WIDE, WIDE).requires_grad_(False), nn.Linear(WIDE, 2)
        self.places = nn.Parameter(torch.randn(ROWS, 1, WIDE))
        nn.init.zeros_(self.head.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.head((self.embed(x).transpose(0, 1) + self.places).tanh().mean(0))


class Attends(nn.Module):
    """Examples attend to a table that is computed; the head is zero at first."""

    def __init__(self):
        super().__init__()
        self.a, self.head = nn.Linear(WIDE, WIDE), nn.Linear(WIDE, 2)
        nn.init.zeros_(self.head.weight)

    def forward(self, x: Tensor) -> Tensor:
        keys = self.a(grid_of(ROWS)).tanh()
        return self.head((x[:, 0] @ keys.mT).softmax(-1) @ keys)


@pytest.mark.parametrize("mode", FEW)
@pytest.mark.parametrize("make", [SequencesFirst, Attends])
def test_tables_as_long_as_a_batch_are_told_from_it_though_gradients_are_zero_at_first(make, mode):
    for batches in ((ROWS, ROWS, 4, ROWS), (4, ROWS, 1, ROWS)):
        model = make()
        with attached(model, mode) as engine:
            for batch in batches:
                losses_of = of_rows(model, torch.randn(batch, ROWS, WIDE))
                assert_exact(engine, losses_of, range(batch), [0.5] * len(engine.groups))
                nn.init.normal_(model.head.weight)


def test_an_example_that_is_not_finite_is_left_out_whatever_the_layout():
    for of_trace in (range(3), [0, 2]):
        model, x = Two(LAYOUTS["two layouts in one pass"]), torch.randn(3, 3, 5)
        x[1] = torch.inf
        with attached(model, "flat") as engine:
            clip(engine, of_rows(model, x), range(3), traced_on=of_trace)
            assert engine.nonfinite == 1
        assert all(bool(p.grad.isfinite().all()) for p in model.parameters())


@pytest.mark.parametrize("mode", FEW)
def test_gradients_of_many_rows_are_formed_for_some_examples_at_a_time(monkeypatch, mode):
    monkeypatch.setattr("groupwise.clipping.rules.base.chunk_floats", lambda g: 200)  # two examples of three rows each
    for name, batch in (("grouped", 5), ("tiled", 7)):
        model = Two(LAYOUTS[name])
        with attached(model, mode) as engine:
            assert_exact(engine, of_rows(model, torch.randn(batch, 3, 5)), range(batch))
