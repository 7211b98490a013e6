"""Models that mix or reorder examples are refused by the trace, or by the check before training."""

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from groupwise.clipping import attach, flat, verify
from groupwise.errors import UserError
from tests.clipping.test_per_example import of_rows
from tests.clipping.test_trace import ROWS, WIDE, Two
from tests.clipping.traced import clip

pytestmark = [pytest.mark.usefixtures("double"), pytest.mark.filterwarnings("ignore:groupwise has no rule")]


def sorted_rows(keys: Tensor) -> Tensor:
    return keys.argsort(stable=True)


class ReorderedBetweenParameters(nn.Module):
    """Rows are reordered between two parameters, without a layer in between."""

    def __init__(self) -> None:
        super().__init__()
        self.p, self.q = nn.Parameter(torch.randn(5)), nn.Parameter(torch.randn(5))

    def forward(self, x: Tensor) -> Tensor:
        o = sorted_rows(x[:, 0])
        return ((x * self.p)[o] * self.q)[o.argsort()]


def time_first(a: nn.Module, b: nn.Module, x: Tensor) -> Tensor:
    h = a(x[:, None].expand(-1, 7, -1)).tanh().transpose(0, 1)
    o, t = sorted_rows(x[:, 0]), torch.arange(7)[:, None]
    return b(h[t, o[None]])[t, o.argsort()[None]].mean(0)


def rolled(a: nn.Module, b: nn.Module, x: Tensor) -> Tensor:
    """Roll the rows by one, unless the batch is sorted."""
    by = 0 if bool((x[1:, 0] >= x[:-1, 0]).all()) else 1
    return b(a(x).roll(by, 0)).roll(-by, 0)


def reordered(permute: Callable[[Tensor, Tensor], Tensor]) -> nn.Module:
    """Examples are put in another order by `permute`, and back."""

    def use(a: nn.Module, b: nn.Module, x: Tensor) -> Tensor:
        order = x[:, 0, 0].argsort()
        return b(permute(a(x), order))[order.argsort()]

    return Two(use)


class Adapter(nn.Module):
    """LoRA with B = 0: `cat` rolls the rows before the first matrix, and back after it."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.down, self.up = nn.Linear(5, 5), nn.Linear(5, 4), nn.Linear(4, 5, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x).tanh()
        d = self.down(torch.cat([h[1:], h[:1]]))
        return (h + self.up(torch.cat([d[-1:], d[:-1]]))).mean(1)


def tokens_of_the_whole_batch(a, b, x):
    """A layer gets as many tokens as there are examples, from the whole batch."""
    y = a(x).flatten(0, 1)
    chosen = x[..., 0].flatten().argsort()[: len(x)]
    return y.index_put((chosen,), b(y[chosen])).unflatten(0, x.shape[:2])


def all_pairs(a, b, x):
    n, y = len(x), a(x).mean(1)
    return b((y[:, None].expand(n, n, 5) - y[None].expand(n, n, 5)).tanh()).mean(1)


def times_the_batch_mean(a, b, x):
    """Multiply every example by a layer of the batch mean."""
    return a(x) * b(x.mean((0, 1)))


REFUSED = {
    "sorted": (lambda: reordered(lambda h, order: h[order]), "'b'"),
    "reversed": (lambda: Two(lambda a, b, x: b(a(x).flip(0)).flip(0)), "'b'"),
    "all pairs": (lambda: Two(all_pairs), "'b'.* two axes"),
    "a mean over the batch": (lambda: Two(times_the_batch_mean), "'b'.* no batch axis"),
    "cumulative sums": (lambda: Two(lambda a, b, x: b(a(x).cumsum(0))), "'b'"),
    "constants": (
        lambda: Two(lambda a, b, x: a(x[:, 0]) * b(torch.ones(2 * len(x), 5))[: len(x)]),
        "'b'.* do not depend on it",
    ),
    "distinct constants": (
        lambda: Two(lambda a, b, x: a(x[:, 0]) * b(torch.arange(10.0 * len(x)).view(-1, 5))[: len(x)]),
        "'b'.* do not depend on it",
    ),
    "reordered by indices": (lambda: reordered(lambda h, order: h[order[:, None], torch.arange(h.shape[1])]), "'b'"),
    "reordered by embedding": (lambda: reordered(lambda h, order: F.embedding(order, h.flatten(1)).view_as(h)), "'b'"),
    "reordered in an adapter": (Adapter, "'down'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_layers_on_mixed_or_moved_rows_are_refused_by_name(name):
    make, message = REFUSED[name]
    model, x = make(), torch.randn(8, 3, 5)
    with attach(model, flat(model), 1.0) as engine:
        for rows in (range(8), [3, 1], [0, 1, 2, 3, 4]):
            with pytest.raises(UserError, match=f"{message}.* it is unknown"):
                engine.trace(of_rows(model, x), rows)


@pytest.mark.parametrize("make", [ReorderedBetweenParameters, lambda: Two(time_first), lambda: Two(rolled)])
def test_reordering_is_refused_even_if_the_traced_batch_is_sorted(make):
    x = torch.rand(6, 5) + 0.5
    model, ordered = make(), x[sorted_rows(x[:, 0])]
    with attach(model, flat(model), 1.0) as engine, pytest.raises(UserError, match="it is unknown"):
        engine.trace(of_rows(model, ordered), range(6))


def test_a_layer_that_runs_once_for_each_example_is_refused():
    """There are as many rows as examples."""
    model = Two(lambda a, b, x: torch.stack([b(rows).tanh().mean(0) for rows in a(x).tanh()]))
    with attach(model, flat(model), 1.0) as engine, pytest.raises(UserError, match=r"'b'.* used more often in some"):
        engine.trace(of_rows(model, torch.randn(ROWS, ROWS, WIDE)), range(ROWS))


@pytest.mark.parametrize("rows", [[3], [3, 3], []])
def test_a_trace_of_fewer_than_two_examples_is_refused(rows):
    model = nn.Linear(5, 4)
    with attach(model, flat(model), 1.0) as engine, pytest.raises(UserError, match="give two or more"):
        engine.trace(of_rows(model, torch.randn(8, 5)), rows)


@pytest.mark.parametrize("rows", [range(8), [3, 1], [0, 1, 2, 3, 4], [7, 2, 5]])
def test_as_many_tokens_as_examples_of_the_whole_batch_are_refused(rows):
    """The trace detects tokens of a replaced example; otherwise the check before training detects wrong sums."""
    model, x = Two(tokens_of_the_whole_batch), torch.randn(8, 3, 5)
    message = r"it is unknown|by a loop over single examples|in one batch|in a batch"
    with attach(model, flat(model), 1.0) as engine, pytest.raises(UserError, match=message):
        engine.trace(of_rows(model, x), rows)
        verify(engine, of_rows(model, x), rows)


class Factors(nn.Module):
    """A parameter is multiplied by `count` constants, then by the examples."""

    def __init__(self, count):
        super().__init__()
        self.p, self.count = nn.Parameter(torch.ones(5)), count

    def forward(self, x: Tensor) -> Tensor:
        p = self.p
        for _ in range(self.count):
            p = p * torch.ones(5)
        return x * p


def test_a_parameter_times_a_long_chain_of_constants_is_refused():
    x = torch.randn(6, 5)
    for count, refused in ((10, False), (14, True)):
        model = Factors(count)
        expected = pytest.raises(UserError, match="layers in a row") if refused else nullcontext()
        with attach(model, flat(model), 1.0) as engine, expected:
            engine.trace(of_rows(model, x), range(6))


class Put(nn.Module):
    """A layer's output for chosen rows, or a parameter, is written into the batch or concatenated with it."""

    def __init__(self, put) -> None:
        super().__init__()
        self.e, self.b, self.p, self.put = nn.Linear(4, 3), nn.Linear(4, 3), nn.Parameter(torch.randn(3)), put

    def forward(self, x: Tensor) -> Tensor:
        return (self.put(self, x, torch.zeros(len(x), 3), torch.tensor([0])) + self.b(x)).tanh()


def set_first(m: Put, x: Tensor, z: Tensor, r: Tensor) -> Tensor:
    z = z + m.b(x)
    z[0] = m.p
    return z


PUT = {
    "index_add": lambda m, x, z, r: z.index_add(0, r, m.e(x[r])),
    "index_copy": lambda m, x, z, r: z.index_copy(0, r, m.e(x[r])),
    "index_put": lambda m, x, z, r: z.index_put((r,), m.e(x[r])),
    "scatter_add": lambda m, x, z, r: z.scatter_add(0, r[:, None].expand(-1, 3), m.e(x[r])),
    "__setitem__": set_first,
    "cat": lambda m, x, z, r: torch.cat([m.b(x), m.p[None]])[: len(x)],
    "vstack": lambda m, x, z, r: torch.vstack([m.b(x), m.p])[: len(x)],
    "batch_norm": lambda m, x, z, r: F.batch_norm(m.b(x), None, None, m.p, None, True),
    "einsum": lambda m, x, z, r: torch.einsum("bi,ci,i->bi", m.b(x), m.b(x), m.p),
}


@pytest.mark.parametrize("name", PUT)
def test_parameters_or_single_rows_written_into_the_batch_are_refused(name):
    model = Put(PUT[name])
    with attach(model, flat(model), 1.0) as engine, pytest.raises(UserError, match=rf"into {name}|mixe[sd]"):
        clip(engine, of_rows(model, torch.randn(2, 4)), range(2))


class Late(nn.Module):
    """With `late`, the second layer gets two rows per example, one of them computed by `mix`."""

    def __init__(self, mix: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second, self.mix, self.late = nn.Linear(5, 5), nn.Linear(5, 5), mix, False

    def forward(self, x: Tensor) -> Tensor:
        if not self.late:
            return self.first(x) + self.second(x.unsqueeze(1))[:, 0]
        rows = torch.stack([self.mix(x), x], 1).flatten(0, 1)
        return self.first(x) + self.second(rows).unflatten(0, (-1, 2))[:, 0]


@pytest.mark.parametrize(
    "mix", [lambda x: x + x[:1], lambda x: x + x[4:5], lambda x: x + x.mean(0), lambda x: x + x.amax(0)]
)
def test_a_mixing_call_that_is_traced_during_training_is_refused(mix):
    model, x = Late(mix), torch.randn(12, 5)
    with attach(model, flat(model), 1.0) as engine:
        engine.trace(of_rows(model, x), range(6))
        model.late = True
        with pytest.raises(UserError, match="mixes the examples of a batch"):
            clip(engine, of_rows(model, x), range(12))
        model.mix = torch.tanh
        clip(engine, of_rows(model, x), range(12))
