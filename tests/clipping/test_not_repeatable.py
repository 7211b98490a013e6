"""Backward passes that are not the same twice, rows that are moved behind shapes, and mixtures are refused."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from groupwise.clipping import attach, flat, per_layer
from groupwise.clipping.ownership import _direction
from groupwise.clipping.verification.compare import verify
from groupwise.errors import UserError

pytestmark = pytest.mark.filterwarnings("ignore:groupwise has no rule")

MODES = {"flat": (flat, {}), "layer": (per_layer, {}), "ghost": (flat, {"norms": "ghost"})}


def attached(model: nn.Module, mode: str):
    make_partition, options = MODES[mode]
    return attach(model, make_partition(model), 1.0, **options)


class FusedLoss(torch.autograd.Function):
    """Cross-entropy as fused kernels have it: its gradient is made in forward, and multiplied in place in backward."""

    @staticmethod
    def forward(ctx, logits: Tensor, labels: Tensor) -> Tensor:
        ctx.g = logits.softmax(1) - F.one_hot(labels, logits.shape[1])
        return F.cross_entropy(logits, labels, reduction="none")

    @staticmethod
    def backward(ctx, g: Tensor):
        return ctx.g.mul_(g[:, None]), None


@pytest.mark.parametrize("mode", MODES)
def test_a_loss_whose_backward_changes_what_it_keeps_is_refused(mode):
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
    with attached(model, mode) as engine, pytest.raises(UserError, match="when it runs again"):
        engine.backward(FusedLoss.apply(model(torch.randn(6, 5)), torch.arange(6) % 3))


class Masked(nn.Module):
    """A mask that a recomputation draws anew, or a generator that nobody puts back."""

    def __init__(self, own: bool) -> None:
        super().__init__()
        self.layer, self.generator = nn.Linear(20, 3), torch.Generator() if own else None

    def forward(self, x: Tensor) -> Tensor:
        def masked(x: Tensor) -> Tensor:
            return self.layer(x * (torch.rand(x.shape, generator=self.generator) < 0.2))

        return checkpoint(masked, x, use_reentrant=False, preserve_rng_state=self.generator is not None)


@pytest.mark.parametrize("batch", [1, 6])
@pytest.mark.parametrize("own", [False, True])
def test_ghost_clipping_refuses_a_recomputation_that_differs_between_its_passes(own, batch):
    model = Masked(own)
    with attached(model, "ghost") as engine, pytest.raises(UserError, match="second backward pass"):
        engine.backward(model(torch.randn(batch, 20)).square().sum(1))
    with attached(model, "flat") as engine:  # one pass: what it measures is what it sums
        engine.backward(model(torch.randn(batch, 20)).square().sum(1))


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


def test_a_check_does_not_take_zero_gradients_for_shown():
    model, x = Adapter(), torch.randn(40, 5, 5)

    def losses_of(rows):
        return model(x[list(rows)]).square().sum(1)

    with attached(model, "flat") as engine:
        verify(engine, losses_of, [0, 10, 20, 30, 39])
        engine.backward(losses_of(range(7)))
        nn.init.ones_(model.up.weight)
        with pytest.raises(UserError, match="rows belong to one"):
            engine.backward(losses_of(range(7, 14)))


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


class TimeFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.r = nn.Linear(5, 5), nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x[:, None].expand(-1, 7, -1)).tanh().transpose(0, 1)
        o, t = sorted_rows(x[:, 0]), torch.arange(7)[:, None]
        return self.r(h[t, o[None]])[t, o.argsort()[None]].mean(0)


class Rolled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.r = nn.Linear(5, 5), nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        by = 0 if bool((x[1:, 0] >= x[:-1, 0]).all()) else 5
        return self.r(self.a(x).roll(by)).roll(-by)


@pytest.mark.parametrize("mode", ["flat", "ghost"])
@pytest.mark.parametrize("make", [OfCopies, TimeFirst, Rolled])
def test_rows_that_move_in_a_later_batch_are_seen(make, mode):
    x = torch.rand(6, 5) + 0.5
    model, still = make(), x[sorted_rows(x[:, 0])]
    with attached(model, mode) as engine, pytest.raises(UserError, match="cannot be told whose"):
        for rows in (still, still.flip(0)):
            engine.backward(model(rows).square().sum(1))


def test_the_direction_of_far_entries_is_as_random_as_that_of_the_first():
    numbers = torch.arange(9e7, 9e7 + 20000, dtype=torch.float64)
    direction = _direction(numbers)
    assert len(direction.unique()) > 19000 and abs(float(direction.mean())) < 0.02
    assert abs(float((direction[1:] * direction[:-1]).mean())) < 0.02


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


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", PUT)
def test_what_all_share_is_not_put_into_rows_of_the_batch(name, mode):
    model = Put(PUT[name])
    with attached(model, mode) as engine, pytest.raises(UserError, match=f"(by|into) {name}"):
        engine.backward(model(torch.randn(2, 4)).square().sum(1))


def test_another_tensor_in_a_parameters_place_is_refused():
    model = nn.Sequential(nn.Linear(4, 3))

    class Halved(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = model[0]

        def forward(self, x: Tensor) -> Tensor:
            return functional_call(self.layer, {"weight": 0.5 * self.layer.weight}, (x,))

    halved = Halved()
    with attached(halved, "flat"), pytest.raises(UserError, match=r"'layer\.weight' \(by functional_call"):
        halved(torch.randn(3, 4))
