"""Models in which the rows of an example are not known are refused by the trace, or by the check before training."""

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


class OfCopies(nn.Module):
    """No layer between the rows that indices move and the parameters that meet them."""

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
    """Batches in one order are left as they are."""
    by = 0 if bool((x[1:, 0] >= x[:-1, 0]).all()) else 1
    return b(a(x).roll(by, 0)).roll(-by, 0)


def reordered(there: Callable[[Tensor, Tensor], Tensor]) -> nn.Module:
    """Examples are put in another order and back, by `there`."""

    def use(a: nn.Module, b: nn.Module, x: Tensor) -> Tensor:
        order = x[:, 0, 0].argsort()
        return b(there(a(x), order))[order.argsort()]

    return Two(use)


class Adapter(nn.Module):
    """LoRA's second matrix is zero at first; rows before the first change places, and back, by `cat`."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.down, self.up = nn.Linear(5, 5), nn.Linear(5, 4), nn.Linear(4, 5, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x).tanh()
        d = self.down(torch.cat([h[1:], h[:1]]))
        return (h + self.up(torch.cat([d[-1:], d[:-1]]))).mean(1)


def one_for_each(a, b, x):
    """As many tokens as examples, from anywhere."""
    y = a(x).flatten(0, 1)
    chosen = x[..., 0].flatten().argsort()[: len(x)]
    return y.index_put((chosen,), b(y[chosen])).unflatten(0, x.shape[:2])


def all_pairs(a, b, x):
    n, y = len(x), a(x).mean(1)
    return b((y[:, None].expand(n, n, 5) - y[None].expand(n, n, 5)).tanh()).mean(1)


def by_the_mean(a, b, x):
    """A number of the whole batch, which every example meets."""
    return a(x) * b(x.mean((0, 1)))


REFUSED = {
    "sorted": (lambda: reordered(lambda h, order: h[order]), "'b'"),
    "reversed": (lambda: Two(lambda a, b, x: b(a(x).flip(0)).flip(0)), "'b'"),
    "all pairs": (lambda: Two(all_pairs), "'b'.* two axes"),
    "a mean over the batch": (lambda: Two(by_the_mean), "'b'.* no batch axis"),
    "the examples before it": (lambda: Two(lambda a, b, x: b(a(x).cumsum(0))), "'b'"),
    "constants of no example": (
        lambda: Two(lambda a, b, x: a(x[:, 0]) * b(torch.ones(2 * len(x), 5))[: len(x)]),
        "'b'.* do not depend on it",
    ),
    "rows of numbers of their own": (
        lambda: Two(lambda a, b, x: a(x[:, 0]) * b(torch.arange(10.0 * len(x)).view(-1, 5))[: len(x)]),
        "'b'.* do not depend on it",
    ),
    "rows by two indices": (lambda: reordered(lambda h, order: h[order[:, None], torch.arange(h.shape[1])]), "'b'"),
    "rows of a table": (lambda: reordered(lambda h, order: F.embedding(order, h.flatten(1)).view_as(h)), "'b'"),
    "rows of an adapter": (Adapter, "'down'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_mixes_or_moves_rows_is_refused_by_name(name):
    make, says = REFUSED[name]
    model, x = make(), torch.randn(8, 3, 5)
    with attach(model, flat(model), 1.0) as engine:
        for rows in (range(8), [3, 1], [0, 1, 2, 3, 4]):
            with pytest.raises(UserError, match=f"{says}.* it is unknown"):
                engine.trace(of_rows(model, x), rows)


@pytest.mark.parametrize("make", [OfCopies, lambda: Two(time_first), lambda: Two(rolled)])
def test_rows_that_move_by_what_examples_hold_are_seen_though_these_are_in_order(make):
    x = torch.rand(6, 5) + 0.5
    model, still = make(), x[sorted_rows(x[:, 0])]
    with attach(model, flat(model), 1.0) as engine, pytest.raises(UserError, match="it is unknown"):
        engine.trace(of_rows(model, still), range(6))


class RowByRow(nn.Module):
    """A layer that gets one example's rows at a time, of which there are as many as examples."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(WIDE, WIDE * ROWS), nn.Linear(WIDE, 2)

    def forward(self, x):
        rows = self.a(x[:, 0]).tanh().unflatten(1, (ROWS, WIDE))
        return torch.stack([self.b(each).tanh().mean(0) for each in rows])


def test_a_layer_that_runs_once_for_each_example_is_refused():
    model = RowByRow()
    with attach(model, flat(model), 1.0) as engine, pytest.raises(UserError, match=r"'b'.* used more often in some"):
        engine.trace(of_rows(model, torch.randn(ROWS, ROWS, WIDE)), range(ROWS))


@pytest.mark.parametrize("rows", [[3], [3, 3], []])
def test_one_example_alone_shows_nothing(rows):
    model = nn.Linear(5, 4)
    with attach(model, flat(model), 1.0) as engine, pytest.raises(UserError, match="give two or more"):
        engine.trace(of_rows(model, torch.randn(8, 5)), rows)


@pytest.mark.parametrize("rows", [range(8), [3, 1], [0, 1, 2, 3, 4], [7, 2, 5]])
def test_as_many_tokens_as_examples_are_refused(rows):
    """The trace sees those of an example that it replaces; the check, the sums of all."""
    model, x = Two(one_for_each), torch.randn(8, 3, 5)
    says = r"it is unknown|by a loop over single examples|in one batch|in a batch"
    with attach(model, flat(model), 1.0) as engine, pytest.raises(UserError, match=says):
        engine.trace(of_rows(model, x), rows)
        verify(engine, of_rows(model, x), rows)


class Factors(nn.Module):
    """A parameter meets one constant after the other, and then the examples."""

    def __init__(self, many):
        super().__init__()
        self.p, self.many = nn.Parameter(torch.ones(5)), many

    def forward(self, x: Tensor) -> Tensor:
        p = self.p
        for _ in range(self.many):
            p = p * torch.ones(5)
        return x * p


def test_constants_that_a_parameter_meets_one_after_the_other_are_refused_from_twelve_on():
    x = torch.randn(6, 5)
    for many, refused in ((10, False), (14, True)):
        model = Factors(many)
        found = pytest.raises(UserError, match="layers in a row") if refused else nullcontext()
        with attach(model, flat(model), 1.0) as engine, found:
            engine.trace(of_rows(model, x), range(6))


class Put(nn.Module):
    """What a layer makes of chosen rows, or a parameter, goes into rows of the batch, or among them."""

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
def test_what_all_share_is_not_put_into_rows_of_the_batch(name):
    model = Put(PUT[name])
    with attach(model, flat(model), 1.0) as engine, pytest.raises(UserError, match=rf"into {name}|mixe[sd]"):
        clip(engine, of_rows(model, torch.randn(2, 4)), range(2))


class Late(nn.Module):
    """Gives its second layer other rows later: two an example, mixed by `mix`."""

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
def test_a_call_that_is_traced_during_training_does_not_depend_on_any_other_row(mix):
    model, x = Late(mix), torch.randn(12, 5)
    with attach(model, flat(model), 1.0) as engine:
        engine.trace(of_rows(model, x), range(6))
        model.late = True
        with pytest.raises(UserError, match="mixes the examples of a batch"):
            clip(engine, of_rows(model, x), range(12))
        model.mix = torch.tanh
        clip(engine, of_rows(model, x), range(12))
