"""Rows that data choose, outputs changed in place, parameters in operations of one's own: exact, or refused by name."""

from functools import partial

import pytest
import torch
from torch import nn

from groupwise.clipping import attach, flat, per_layer, shared_parameters, verify
from groupwise.errors import UserError
from tests.clipping.traced import clip, clip_batch


class Chosen(nn.Module):
    """The tokens that are marked go through a layer of their own."""

    def __init__(self):
        super().__init__()
        self.below, self.expert, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x, marked):
        rows, where = self.below(x).reshape(-1, 4), marked.reshape(-1).nonzero().flatten()
        return self.head(rows.index_add(0, where, self.expert(rows[where])).reshape(x.shape).mean(1))


def marks(*of_each):
    return torch.arange(4) < torch.tensor(of_each)[:, None]


def norms_by_loop(model, losses_of, examples):
    found = []
    for i in range(examples):
        gradients = torch.autograd.grad(losses_of(i).sum(), list(model.parameters()), allow_unused=True)
        found.append(sum(g.square().sum() for g in gradients if g is not None).sqrt())
    return torch.stack(found)


@pytest.mark.parametrize("later", [(4, 4, 0, 0), (4, 0, 0, 0), (1, 3, 3, 1)])
def test_rows_that_data_choose_are_refused_where_they_are_not_each_examples_own(later):
    torch.manual_seed(0)
    model, x = Chosen().double(), torch.randn(4, 4, 4).double()

    def losses_of(marked):
        return lambda rows: model(x[list(rows)], marked[list(rows)]).square().sum(1)

    with attach(model, flat(model), 1.0) as engine, pytest.raises(UserError, match=r"'expert' .* freeze the layer"):
        engine.trace(losses_of(marks(*later)), range(4))
    with attach(model, flat(model), 1.0) as engine:  # all tokens, in their order, show nothing of other ones
        clip(engine, losses_of(marks(4, 4, 4, 4)), range(4))
        right = norms_by_loop(model, lambda i: losses_of(marks(4, 4, 4, 4))([i]), 4)
        torch.testing.assert_close(engine.per_example_norms[0], right)


@pytest.mark.parametrize("later", [(4, 4, 0, 0), (4, 0, 0, 0), (1, 3, 3, 1), (4, 0, 0, 1), (3, 3, 2, 1)])
def test_rows_that_data_choose_later_are_refused_too(later):
    model, x = Chosen().double(), torch.randn(4, 4, 4).double()
    with attach(model, flat(model), 1.0) as engine:
        clip_batch(engine, lambda x, marked: model(x, marked).square().sum(1), x, marks(4, 4, 4, 4))
        with pytest.raises(UserError, match=r"'expert' .* freeze the layer"):
            clip_batch(engine, lambda x, marked: model(x, marked).square().sum(1), x, marks(*later))


class Tripled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight):
        return 3 * weight

    @staticmethod
    def backward(ctx, g):
        return 3 * g


class Own(nn.Module):
    """A weight that goes through `made` before it is used."""

    def __init__(self, made):
        super().__init__()
        self.below, self.weight, self.made = nn.Linear(4, 4), nn.Parameter(torch.rand(4)), made

    def forward(self, x):
        return self.below(x) * self.made(self.weight)


def in_place(weight):
    made = torch.zeros(2, 4, dtype=weight.dtype)
    made[0] = weight
    return made.sum(0)


def out_of_place(weight):
    return torch.zeros(2, 4, dtype=weight.dtype).index_put((torch.tensor([0]),), weight).sum(0)


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (Tripled.apply, "Parameter 'weight' goes into Tripled, a torch.autograd.Function"),
        (in_place, r"Parameter 'weight' is written in place \(by __setitem__\) .*index_put"),
    ],
)
def test_what_cannot_be_told_apart_is_named(made, says):
    model = Own(made).double()
    with attach(model, flat(model), 1.0) as engine, pytest.raises(UserError, match=says):
        clip_batch(engine, lambda x: model(x).sum(1), torch.rand(3, 4).double())


@pytest.mark.parametrize("made", [lambda weight: 3 * weight, out_of_place, lambda weight: weight.sum()])
@pytest.mark.parametrize("examples", [1, 3])
def test_and_the_remedies_work(made, examples):
    torch.manual_seed(0)
    model, x = Own(made).double(), torch.rand(examples, 4).double()
    with attach(model, flat(model), 1.0) as engine:
        clip_batch(engine, lambda x: model(x).square().sum(1), x)
        right = norms_by_loop(model, lambda i: model(x[i : i + 1]).square(), examples)
    torch.testing.assert_close(engine.per_example_norms[0], right)


@pytest.mark.parametrize("rate", [0.0, 0.5])
def test_two_rows_of_each_example_one_after_the_other_are_still_told_apart_in_the_check_before_training(rate):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(rate), nn.Linear(8, 4)).double()
    left, right = torch.randn(8, 4).double(), torch.randn(8, 4).double()

    def losses_of(rows):
        one, other = model(torch.cat([left[list(rows)], right[list(rows)]])).chunk(2)
        return (one * other).sum(1)

    with attach(model, flat(model), 0.1) as engine:
        assert verify(engine, losses_of, range(8)) < 1e-9


class FixedBias(nn.Linear):
    """A bias that is no parameter but a property of the class."""

    def __init__(self, p, d):
        nn.Module.__init__(self)
        self.weight = nn.Parameter(torch.randn(d, p))

    @property
    def bias(self):
        return torch.arange(1.0, 1 + len(self.weight))


def by_buffer(layer, name):
    values = torch.randn_like(getattr(layer, name))
    delattr(layer, name)
    layer.register_buffer(name, values)
    return layer


@pytest.mark.parametrize(
    "made",
    [
        lambda: by_buffer(nn.Linear(4, 4), "bias"),
        lambda: by_buffer(nn.Linear(4, 4), "weight"),
        lambda: by_buffer(nn.LayerNorm(4), "weight"),
        lambda: FixedBias(4, 4),
    ],
    ids=["a bias", "a weight", "a norm's weight", "a property"],
)
@pytest.mark.parametrize("examples", [1, 3])
def test_a_value_that_is_no_parameter_is_used_as_it_is(double, made, examples):
    model, x = nn.Sequential(made(), nn.Tanh(), nn.Linear(4, 3)), torch.randn(examples, 5, 4)
    wanted = model(x)
    with attach(model, flat(model), 1.0) as engine:
        clip_batch(engine, lambda x: model(x).flatten(1).sum(1), x)
        with engine.forward(examples):
            torch.testing.assert_close(model(x), wanted)
        right = norms_by_loop(model, lambda i: model(x[i : i + 1]), examples)
    torch.testing.assert_close(engine.per_example_norms[0], right)


class Pairs(nn.Module):
    """Two rows of each example, one after the other, through a norm; sequences first with heads through another."""

    def __init__(self):
        super().__init__()
        self.below, self.norm, self.of_heads, self.head = (
            nn.Linear(4, 4),
            nn.LayerNorm(4),
            nn.LayerNorm(2),
            nn.Linear(4, 3),
        )

    def forward(self, x):
        below = self.below(x)
        left, right = self.norm(torch.cat([below, below.sin()])).chunk(2)
        heads = self.of_heads((left * right).transpose(0, 1).unflatten(2, (2, 2)))
        return self.head(heads.flatten(2).mean(0))


@pytest.mark.parametrize("examples", [1, 3, 5])
def test_a_norm_of_rows_in_any_order(double, examples):
    model, x = Pairs(), torch.randn(examples, 6, 4)
    with attach(model, flat(model), 1.0) as engine:
        clip_batch(engine, lambda x: model(x).sum(1), x)
        right = norms_by_loop(model, lambda i: model(x[i : i + 1]), examples)
    torch.testing.assert_close(engine.per_example_norms[0], right)


class LearnedMask(nn.Module):
    """Numbers added to the scores of every head."""

    def __init__(self):
        super().__init__()
        self.attention, self.mask = nn.MultiheadAttention(4, 2, batch_first=True), nn.Parameter(torch.randn(6, 6))

    def forward(self, x, by_name):
        masks = {"attn_mask": self.mask} if by_name else {}
        return self.attention(x, x, x, *([] if by_name else [None, True, self.mask]), **masks)[0]


@pytest.mark.parametrize("by_name", [True, False])
@pytest.mark.parametrize("examples", [1, 3, 6])
def test_a_mask_that_is_learned(double, examples, by_name):
    model, x = LearnedMask(), torch.randn(examples, 6, 4)
    with attach(model, flat(model), 1.0) as engine:
        clip_batch(engine, lambda x: model(x, by_name).flatten(1).sum(1), x)
        right = norms_by_loop(model, lambda i: model(x[i : i + 1], by_name), examples)
    torch.testing.assert_close(engine.per_example_norms[0], right)


class Routed(nn.Module):
    """An expert for the tokens above zero, of which an example may have none."""

    def __init__(self):
        super().__init__()
        self.below, self.expert, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x):
        rows = self.below(x)
        return self.head(rows.index_put((x[..., 0] > 0,), self.expert(rows[x[..., 0] > 0])).mean(1))


@pytest.mark.parametrize("tokens", [0, 1, 3])
def test_one_example_of_which_an_expert_gets_no_token(double, tokens):
    model, x = Routed(), torch.randn(1, 3, 4)
    x[..., 0] = torch.arange(3) - 2.5 + tokens
    with attach(model, flat(model), 1.0) as engine:
        clip_batch(engine, lambda x: model(x).sum(1), x)
        right = norms_by_loop(model, lambda i: model(x), 1)
    torch.testing.assert_close(engine.per_example_norms[0], right)


class FixedQueries(nn.Module):
    """Queries that all examples share, through a layer, look at positions, as many as two batches have examples."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queries", torch.randn(1, 4, 8))
        self.layer, self.attention = nn.Linear(8, 8), nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x):
        queries = self.layer(self.queries.expand(len(x), -1, -1))
        return self.attention(queries, x, x)[0].square().sum((1, 2))


class Rest(nn.Module):
    """A table of what is left of a number, straight to the output."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 3)

    def forward(self, x):
        return self.table(x % 7)


@pytest.mark.parametrize("grouping", [flat, per_layer])
@pytest.mark.parametrize(
    "made, examples",
    [(FixedQueries, lambda n: torch.randn(n, 16, 8)), (Rest, lambda n: torch.randint(0, 50, (n,)))],
    ids=["queries", "rest"],
)
def test_what_all_examples_share_may_meet_them_before_its_group_has_run(double, grouping, made, examples):
    model = made()
    for n in (8, 5):
        x = examples(n)
        with attach(model, grouping(model), 1.0) as engine:
            clip_batch(engine, partial(losses_of, model), x)
            found = engine.per_example_norms.square().sum(0).sqrt()
        torch.testing.assert_close(found, norms_by_loop(model, lambda i, x=x: losses_of(model, x[i : i + 1]), n))


def losses_of(model, x):
    y = model(x)
    return y if y.dim() == 1 else y.square().sum(1)


def test_a_convolution_that_frames_share_is_measured_a_few_examples_at_a_time(double, monkeypatch):
    class Frames(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 3, 3, padding=1)

        def forward(self, x):
            frames = self.conv(self.conv(x.flatten(0, 1)).tanh())
            return frames.unflatten(0, x.shape[:2]).square().sum((1, 2, 3, 4))

    monkeypatch.setattr(shared_parameters, "CHUNK_FLOATS", 200)
    model, x = Frames(), torch.randn(5, 2, 3, 4, 4)
    with attach(model, flat(model), 1.0) as engine:
        clip_batch(engine, model, x)
        found = engine.per_example_norms[0]
    torch.testing.assert_close(found, norms_by_loop(model, lambda i: model(x[i : i + 1]), 5))
