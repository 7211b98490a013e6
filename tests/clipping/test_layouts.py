"""Which axis of a layer's input counts examples: told by shapes, shown by gradients, or refused."""

import contextlib
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from groupwise.clipping import attach, flat, ownership, per_layer
from groupwise.clipping.layouts import Order
from groupwise.clipping.ownership import Rows, agreeing
from groupwise.clipping.reference import clipped_sums
from groupwise.errors import UserError
from tests.clipping.alone import looped
from tests.clipping.turns import in_turn
from tests.combinations import pairs_fast

pytestmark = [pytest.mark.usefixtures("double"), pytest.mark.filterwarnings("ignore:groupwise has no rule")]

MODES = {"flat": (flat, {}), "layer": (per_layer, {}), "ghost": (flat, {"norms": "ghost"})}


class Two(nn.Module):
    def __init__(self, use):
        super().__init__()
        self.a, self.b, self.use = nn.Linear(5, 5), nn.Linear(5, 5), use

    def forward(self, x: Tensor) -> Tensor:
        return self.use(self.a, self.b, x)


def losses_of(model: nn.Module, x: Tensor, examples) -> Tensor:
    out = model(x[examples]).flatten(1)
    return (out * torch.arange(1.0, 1 + out.shape[1]).sin()).sum(1) * (torch.tensor(examples) + 1.0)


def exact_or_refused(model, x, mode) -> bool:
    """Whether it was exact; refusals are a UserError, and anything else fails."""
    make_partition, options = MODES[mode]
    partition, everybody = make_partition(model), list(range(len(x)))
    loop = looped(model, lambda i: losses_of(model, x, [i])[0], everybody)
    first = clipped_sums(model, loop, everybody, partition, [1.0] * len(partition))
    thresholds = [max(float(row.median()), 1e-6) for row in first.norms]
    truth = clipped_sums(model, loop, everybody, partition, thresholds)
    model.zero_grad()
    with attach(model, partition, thresholds, **options) as engine:
        try:
            engine.backward(losses_of(model, x, everybody))
        except UserError:
            return False
        torch.testing.assert_close(engine.per_example_norms, truth.norms, rtol=1e-7, atol=1e-10)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, truth.sums[name], rtol=1e-8, atol=1e-9 * max(thresholds))
    return True


def pairs(a, b, x):
    left, right = a(torch.cat([b(x), x.sin()])).tanh().chunk(2)
    return left * right


EXACT = {
    "sequences first": lambda a, b, x: a(b(x.transpose(0, 1)).tanh()).transpose(0, 1),
    "two layouts in one pass": lambda a, b, x: b(a(x)) + a(b(x).transpose(0, 1)).transpose(0, 1),
    "two layouts one after the other": lambda a, b, x: a(b(a(x).transpose(0, 1)).tanh()).transpose(0, 1),
    "folded": lambda a, b, x: b(a(x.flatten(0, 1)).tanh()).unflatten(0, (-1, x.shape[1])),
    "pairs": pairs,
}


@pytest.mark.parametrize(("name", "mode", "batches"), in_turn(EXACT, list(MODES), [1, 2, 3, 5, 6]))
def test_layouts_are_exact_whatever_axes_have_the_same_length(name, mode, batches):
    for batch in batches:
        assert exact_or_refused(Two(EXACT[name]), torch.randn(batch, 3, 5), mode), batch


def one_for_each(a, b, x):
    """As many tokens as examples, from anywhere."""
    y = a(x).flatten(0, 1)
    chosen = x[..., 0].flatten().argsort()[: len(x)]
    return y.index_put((chosen,), b(y[chosen])).unflatten(0, x.shape[:2])


NEVER_WRONG = {
    "batch on the third axis": lambda a, b, x: a(
        b(x).unsqueeze(0).expand(3, -1, -1, -1).transpose(1, 2).tanh()
    ).permute(2, 0, 1, 3),
    "sorted": lambda a, b, x: b(a(x)[x[:, 0, 0].argsort()])[x[:, 0, 0].argsort().argsort()],
    "turned round": lambda a, b, x: b(a(x).flip(0)).flip(0),
    "experts": one_for_each,
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", NEVER_WRONG)
def test_rows_that_are_not_in_the_order_of_the_losses_are_refused(name, mode):
    told = [exact_or_refused(Two(NEVER_WRONG[name]), torch.randn(b, 3, 5), mode) for b in (1, 3, 5, 6)]
    assert not all(told)


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.experts = nn.Linear(5, 5), nn.ModuleList(nn.Linear(5, 5) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        y = self.gate(x)
        for expert, tokens in zip(self.experts, (x[..., 0] > 0, x[..., 0] <= 0), strict=True):
            y = y.index_put((tokens,), expert(y[tokens]))
        return y


def test_a_mixture_of_experts_is_refused_in_a_later_step_too():
    model, accepted, refused = Experts(), 0, 0
    with attach(model, per_layer(model), 1.0) as engine:
        for step in range(20):
            x = torch.randn(4, 3, 5)
            x[..., 0] = -1
            if step == 0:
                x[:, 0, 0] = 1  # one token of each example: rows that are theirs
            else:
                x.view(12, 5)[torch.tensor([0, 1, 2, 3 + step % 9]), 0] = 1  # as many, three of them one example's
            try:
                engine.backward(model(x).flatten(1).sum(1))
                accepted += 1
            except UserError:
                refused += 1
    assert (accepted, refused) == (1, 19)


ROWS, WIDE = 6, 5


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
        grid = torch.arange(1.0, 1 + x.shape[1]).outer(torch.arange(1.0, 1 + WIDE)).sin()
        first = self.of_examples(self, x, h)
        return self.head((h.tanh() * self.of_all(self, grid)).mean(1) + first)


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
    pairs_fast(product(MET_TWICE, MODES, [(4, 6, 3, 6), (6, 6, 4, 6), (3, 6, 12), (2, 3, 6)])),
)
def test_what_all_examples_share_is_not_taken_for_the_batch_where_it_is_as_long(name, mode, batches):
    make_partition, options = MODES[mode]
    model = MetTwice(*MET_TWICE[name])
    (model.layer if "parameter that" in name or name == "a parameter" else model.scale).requires_grad_(False)  # unused
    partition = make_partition(model)
    thresholds = [0.5] * len(partition)
    with attach(model, partition, thresholds, **options) as engine:
        for step, batch in enumerate(batches):
            x, everybody = torch.randn(batch, ROWS, WIDE), list(range(batch))
            model.zero_grad()
            try:
                engine.backward(losses_of(model, x, everybody))
            except UserError:
                assert set(batches[: step + 1]) == {ROWS}, "no other size has told them apart yet"
                continue
            sums = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
            with engine.bypassed():
                truth = clipped_sums(
                    model, lambda i, x=x: losses_of(model, x, [i])[0], everybody, partition, thresholds
                )
            for name_of, wanted in truth.sums.items():
                torch.testing.assert_close(sums[name_of], wanted, rtol=1e-8, atol=1e-10)


class SequencesFirst(nn.Module):
    """A head that is zero at first, so that no gradient tells anything then."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Linear(WIDE, WIDE), nn.Linear(WIDE, 2)
        self.places = nn.Parameter(torch.randn(ROWS, 1, WIDE))
        nn.init.zeros_(self.head.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.head((self.embed(x).transpose(0, 1) + self.places).tanh().mean(0))


@pytest.mark.parametrize("mode", MODES)
def test_gradients_that_are_zero_show_nothing(mode):
    make_partition, options = MODES[mode]
    model = SequencesFirst()
    for parameter in model.embed.parameters():
        parameter.requires_grad_(False)  # which shapes would tell
    partition = make_partition(model)
    with attach(model, partition, [0.5] * len(partition), **options) as engine:
        x = torch.randn(ROWS, ROWS, WIDE)
        engine.backward(losses_of(model, x, list(range(ROWS))))
        nn.init.normal_(model.head.weight)
        with pytest.raises(UserError, match="places"):
            engine.backward(losses_of(model, x, list(range(ROWS))))


class EmbeddedConvolution(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.conv = nn.Embedding(7, 4), nn.Conv1d(4, 3, 2)

    def forward(self, ids: Tensor) -> Tensor:
        return self.conv(self.table(ids).transpose(1, 2))


@pytest.mark.parametrize("mode", MODES)
def test_a_microbatch_of_one_through_embedding_and_convolution(mode):
    for batch in (1, 4, 6):
        assert exact_or_refused(EmbeddedConvolution(), torch.randint(0, 7, (batch, 6)), mode)


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv1d(3, 3, 1, bias=False), nn.InstanceNorm1d(3, affine=True)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norm(self.conv(x)).mul_(2), inplace=True)


@pytest.mark.parametrize("mode", MODES)
def test_in_place_operations_after_a_norm(mode):
    assert exact_or_refused(Normed(), torch.randn(4, 3, 5), mode)


def test_an_example_that_is_not_finite_is_left_out_where_gradients_show_the_order():
    model, x = Two(EXACT["two layouts in one pass"]), torch.randn(3, 3, 5)
    x[1] = torch.inf
    with attach(model, flat(model), 1.0) as engine:
        engine.backward(losses_of(model, x, [0, 1, 2]))
        assert engine.nonfinite == 1
    assert all(bool(p.grad.isfinite().all()) for p in model.parameters())


def test_a_pipeline_learns_layouts_from_an_output():
    model, x = Two(EXACT["two layouts in one pass"]), torch.randn(3, 3, 5)
    partition = flat(model)
    truth = clipped_sums(model, lambda i: losses_of(model, x, [i])[0], range(3), partition, [0.5])
    with attach(model, partition, 0.5) as engine:
        with engine.forward_of(0):
            losses = losses_of(model, x, [0, 1, 2])
        with pytest.raises(UserError, match="check_output"), engine.backward_of(0, 3):
            losses.sum().backward()
        model.zero_grad()
        with engine.forward_of(0):
            losses = losses_of(model, x, [0, 1, 2])
            engine.check_output(losses)
        with engine.backward_of(0, 3):
            losses.sum().backward()
    torch.testing.assert_close(model.a.weight.grad, truth.sums["a.weight"])


@pytest.mark.parametrize("order", [Order.FIRST, Order.SECOND, Order.FOLDED, Order.STACKED])
def test_an_order_agrees_with_gradients_in_that_order_alone(order):
    weights = torch.tensor([1.0, 4.0, 0.5])
    shape = {Order.FIRST: (3, 4, 5), Order.SECOND: (4, 3, 5)}.get(order, (6, 4, 5))
    plain = torch.randn(shape)
    scale = {Order.FOLDED: weights.repeat_interleave(2), Order.STACKED: weights.repeat(2)}.get(order, weights)
    weighed = plain * scale.view((1, 3, 1) if order is Order.SECOND else (-1, 1, 1))
    assert agreeing(Rows.of(plain, {}), Rows.of(weighed, {}), weights) == [order]
    weighed[0, 0, 0] *= 1.01  # one number of one row
    assert agreeing(Rows.of(plain, {}), Rows.of(weighed, {}), weights) == []


@pytest.mark.parametrize("shape", [(5,), (0,), (4, 3), (3, 0), (4, 1, 3), (2, 3, 4, 5)])
def test_rows_are_looked_at_in_parts(monkeypatch, shape):
    g = torch.randn(shape).transpose(0, -1).contiguous().transpose(0, -1)
    whole = Rows.of(g, {})
    for part in (1, 7):
        monkeypatch.setattr(ownership, "PART", part)
        for one, other in zip(
            (*whole.projections, *whole.lengths), (*(again := Rows.of(g, {})).projections, *again.lengths), strict=True
        ):
            torch.testing.assert_close(one, other)
    for axis, lengths in enumerate(whole.lengths):
        others = [other for other in range(g.dim()) if other != axis]
        torch.testing.assert_close(lengths, g.double().square().sum(others).sqrt() if others else g.double().abs())


@pytest.mark.parametrize("mode", MODES)
def test_gradients_of_many_rows_are_formed_for_some_examples_at_a_time(monkeypatch, mode):
    monkeypatch.setattr("groupwise.clipping.rules.per_example.CHUNK_FLOATS", 200)  # two examples of three rows each
    assert exact_or_refused(Two(EXACT["folded"]), torch.randn(5, 3, 5), mode)
    assert exact_or_refused(Two(EXACT["pairs"]), torch.randn(7, 3, 5), mode)


def shared_grid(x):
    return torch.arange(1.0, 1 + ROWS).outer(torch.arange(1.0, 1 + WIDE)).sin().to(x.dtype)


class Towers(nn.Module):
    """Two towers: one gets the examples, the other rows that all of them share."""

    def __init__(self):
        super().__init__()
        self.of_examples, self.of_rows = nn.Linear(WIDE, WIDE), nn.Linear(WIDE, WIDE)

    def forward(self, x, rows):
        return self.of_examples(x).tanh() @ self.of_rows(rows).tanh().mT


class RowByRow(nn.Module):
    """A layer that gets one example's rows at a time, of which there are as many as examples."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(WIDE, WIDE * ROWS), nn.Linear(WIDE, 2)

    def forward(self, x):
        return torch.stack([self.b(rows).tanh().mean(0) for rows in self.a(x).tanh().unflatten(1, (ROWS, WIDE))])


class Attends(nn.Module):
    """Examples attend to a table that is computed; the head is zero at first."""

    def __init__(self):
        super().__init__()
        self.a, self.head = nn.Linear(WIDE, WIDE), nn.Linear(WIDE, 2)
        nn.init.zeros_(self.head.weight)

    def forward(self, x):
        keys = self.a(shared_grid(x)).tanh()
        return self.head((x @ keys.mT).softmax(-1) @ keys)


class Reordered(nn.Module):
    """Examples are put in another order and back, by `there`."""

    def __init__(self, there):
        super().__init__()
        self.a, self.b, self.there = nn.Linear(WIDE, WIDE), nn.Linear(WIDE, WIDE), there

    def forward(self, x):
        order = x[:, 0, 0].argsort()
        return self.b(self.there(self.a(x), order))[order.argsort()]


TAKEN_FOR_THE_BATCH = {
    "two towers": (Towers, lambda m, x: m(x[:, 0], shared_grid(x))),
    "one example's rows": (RowByRow, lambda m, x: m(x[:, 0])),
    "attention to a table": (Attends, lambda m, x: m(x[:, 0])),
    "rows by two indices": (
        lambda: Reordered(lambda h, order: h[order[:, None], torch.arange(h.shape[1])]),
        lambda m, x: m(x).flatten(1),
    ),
    "rows of a table": (
        lambda: Reordered(lambda h, order: F.embedding(order, h.flatten(1)).view_as(h)),
        lambda m, x: m(x).flatten(1),
    ),
}


@pytest.mark.parametrize(
    ("name", "mode", "batches"),
    pairs_fast(product(TAKEN_FOR_THE_BATCH, MODES, [(ROWS, ROWS, 4, ROWS), (4, ROWS, 1, ROWS)])),
)
def test_no_sum_is_wrong_where_shapes_look_like_the_batch(name, mode, batches):
    """Shapes that were never seen are shown by gradients; a head that is zero shows nothing."""
    make_partition, options = MODES[mode]
    make, run = TAKEN_FOR_THE_BATCH[name]
    model = make()
    partition = make_partition(model)
    thresholds = [0.5] * len(partition)
    with attach(model, partition, thresholds, **options) as engine:
        for batch in batches:
            x, everybody = torch.randn(batch, ROWS, WIDE), list(range(batch))

            def losses_of_some(some, x=x):
                out = run(model, x[some])
                return (out * torch.arange(1.0, 1 + out.shape[1]).sin()).sum(1) * (torch.tensor(some) + 1.0)

            model.zero_grad()
            with contextlib.suppress(UserError):
                engine.backward(losses_of_some(everybody))
            if sums := {of: p.grad for of, p in model.named_parameters() if p.grad is not None}:
                with engine.bypassed():
                    truth = clipped_sums(model, lambda i: losses_of_some([i])[0], everybody, partition, thresholds)
                for of, wanted in truth.sums.items():
                    torch.testing.assert_close(sums[of], wanted, rtol=1e-8, atol=1e-10)
            if name == "attention to a table":
                nn.init.normal_(model.head.weight)
