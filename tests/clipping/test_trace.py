"""The trace finds the batch axis of every layer's input: clipping is exact for every layout."""

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


def constants(length: int) -> Tensor:
    """Constants (length, WIDE), which depend on no example."""
    return torch.arange(1.0, 1 + length).outer(torch.arange(1.0, 1 + WIDE)).sin()


def pairs(a, b, x):
    left, right = a(torch.cat([b(x), x.sin()])).tanh().chunk(2)
    return left * right


def plus_ones(a, b, rows):
    """Add constant rows, like token-type embeddings of a single type."""
    return (a(rows) + b(torch.ones_like(rows))).tanh()


def chain(a, b, x):
    """A chain of layers on inputs that all examples share."""
    return (x + b(a(a(constants(x.shape[1])).tanh()).tanh())).tanh()


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
    "grouped, with constant rows": lambda a, b, x: plus_ones(a, b, x.flatten(0, 1)).unflatten(0, (-1, x.shape[1])),
    "tiled, with constant rows": lambda a, b, x: plus_ones(a, b, torch.cat([x, x.sin()])).unflatten(0, (2, -1)).prod(0),
    "a chain of shared inputs": chain,
}


@pytest.mark.parametrize(("name", "mode", "batches"), covering_pairs(LAYOUTS, FEW, [1, 2, 3, 5, 6]))
def test_layouts_are_exact_even_if_other_axes_are_as_long_as_the_batch(name, mode, batches):
    for batch in batches:
        model = Two(LAYOUTS[name])
        with attached(model, mode) as engine:
            assert_exact(engine, of_rows(model, torch.randn(batch, 3, 5)), range(batch))


@pytest.mark.parametrize("name", LAYOUTS)
def test_one_trace_covers_other_batch_sizes_and_three_cover_lengths(name, monkeypatch):
    traced, original = [], ClippingEngine._trace
    monkeypatch.setattr(ClippingEngine, "_trace", lambda *given: traced.append(1) or original(*given))
    model = Two(LAYOUTS[name])
    with attached(model, "layer") as engine:
        engine.trace(of_rows(model, torch.randn(6, 3, 5)), range(6))
        for batch in (6, 4, 1, 5, 2):
            assert_exact(engine, of_rows(model, torch.randn(batch, 3, 5)), range(batch))
        assert len(traced) == 1
        for batch, length in ((4, 7), (1, 3), (5, 2), (2, 3), (3, 1), (6, 5), (4, 6)):
            assert_exact(engine, of_rows(model, torch.randn(batch, length, 5)), range(batch))
        assert len(traced) <= 3


class UsedOnBoth(nn.Module):
    """One layer or parameter is used on the examples and on rows that all examples share."""

    def __init__(self, on_examples, on_shared):
        super().__init__()
        self.embed, self.layer, self.head = nn.Linear(WIDE, WIDE), nn.Linear(WIDE, WIDE), nn.Linear(WIDE, 2)
        self.scale = nn.Parameter(torch.randn(WIDE))
        self.frozen = nn.Parameter(torch.randn(ROWS, WIDE), requires_grad=False)
        self.on_examples, self.on_shared = on_examples, on_shared

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        first = self.on_examples(self, x, h)
        return self.head((h.tanh() * self.on_shared(self, constants(x.shape[1]))).mean(1) + first)


USED_ON_BOTH = {
    "a parameter": (lambda m, x, h: h.mean(1) * m.scale, lambda m, grid: grid * m.scale),
    "a parameter with inputs": (lambda m, x, h: x.sin().mean(1) * m.scale, lambda m, grid: grid * m.scale),
    "a parameter with a frozen one": (lambda m, x, h: h.mean(1) * m.scale, lambda m, grid: m.frozen * m.scale),
    "a layer": (lambda m, x, h: m.layer(h.mean(1)), lambda m, grid: m.layer(grid)),
    "a layer of inputs": (lambda m, x, h: m.layer(x.sin().mean(1)), lambda m, grid: m.layer(grid)),
    "a layer of a frozen parameter": (lambda m, x, h: m.layer(h.mean(1)), lambda m, grid: m.layer(m.frozen)),
}


@pytest.mark.parametrize(
    ("name", "mode", "batches"),
    pairs_fast(product(USED_ON_BOTH, FEW, [(4, 6, 3, 6), (6, 6, 4, 6), (3, 6, 12), (2, 3, 6)])),
)
def test_shared_rows_as_long_as_the_batch_are_not_taken_for_it(name, mode, batches):
    model = UsedOnBoth(*USED_ON_BOTH[name])
    (model.layer if "parameter with" in name or name == "a parameter" else model.scale).requires_grad_(False)  # unused
    with attached(model, mode) as engine:
        for batch in batches:
            assert_exact(
                engine, of_rows(model, torch.randn(batch, ROWS, WIDE)), range(batch), [0.5] * len(engine.groups)
            )


class SequencesFirst(nn.Module):
    """The sequence axis is first, and the head is zero at first, so that gradients below it are zero."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Linear(WIDE, WIDE).requires_grad_(False), nn.Linear(WIDE, 2)
        self.places = nn.Parameter(torch.randn(ROWS, 1, WIDE))
        nn.init.zeros_(self.head.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.head((self.embed(x).transpose(0, 1) + self.places).tanh().mean(0))


class Attends(nn.Module):
    """Examples attend to keys that a layer computes from constants; the head is zero at first."""

    def __init__(self):
        super().__init__()
        self.a, self.head = nn.Linear(WIDE, WIDE), nn.Linear(WIDE, 2)
        nn.init.zeros_(self.head.weight)

    def forward(self, x: Tensor) -> Tensor:
        keys = self.a(constants(ROWS)).tanh()
        return self.head((x[:, 0] @ keys.mT).softmax(-1) @ keys)


@pytest.mark.parametrize("mode", FEW)
@pytest.mark.parametrize("make", [SequencesFirst, Attends])
def test_shared_rows_are_recognised_even_if_gradients_are_zero_at_first(make, mode):
    for batches in ((ROWS, ROWS, 4, ROWS), (4, ROWS, 1, ROWS)):
        model = make()
        with attached(model, mode) as engine:
            for batch in batches:
                losses_of = of_rows(model, torch.randn(batch, ROWS, WIDE))
                assert_exact(engine, losses_of, range(batch), [0.5] * len(engine.groups))
                nn.init.normal_(model.head.weight)


def test_a_non_finite_example_is_left_out_in_every_layout():
    for traced_on in (range(3), [0, 2]):
        model, x = Two(LAYOUTS["two layouts in one pass"]), torch.randn(3, 3, 5)
        x[1] = torch.inf
        with attached(model, "flat") as engine:
            clip(engine, of_rows(model, x), range(3), traced_on=traced_on)
            assert engine.nonfinite == 1
        assert all(bool(p.grad.isfinite().all()) for p in model.parameters())


@pytest.mark.parametrize("mode", FEW)
def test_gradients_are_formed_in_chunks_of_examples(monkeypatch, mode):
    monkeypatch.setattr("groupwise.clipping.rules.base.chunk_floats", lambda g: 200)  # two examples of three rows each
    for name, batch in (("grouped", 5), ("tiled", 7)):
        model = Two(LAYOUTS[name])
        with attached(model, mode) as engine:
            assert_exact(engine, of_rows(model, torch.randn(batch, 3, 5)), range(batch))
