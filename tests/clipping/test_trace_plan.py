"""What a plan knows of batches that it was not traced on, how it is traced once more, and how it is kept."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from groupwise.clipping import attach, flat, per_layer
from groupwise.clipping.clip_plan import SHARED, CallSite, ClipPlan, Layout, Order, UntracedCall
from tests.clipping.alone import assert_exact
from tests.clipping.test_trace import of_rows

pytestmark = [pytest.mark.usefixtures("double"), pytest.mark.filterwarnings("ignore:groupwise has no rule")]


class Positions(nn.Module):
    """Positions that all examples share, as many as the longest of them is long, with a table and a parameter."""

    def __init__(self):
        super().__init__()
        self.words, self.places, self.scale = nn.Embedding(9, 4), nn.Embedding(40, 4), nn.Parameter(torch.rand(4))

    def forward(self, ids: Tensor, shown: Tensor) -> Tensor:
        rows = torch.arange(ids.shape[1])
        x = self.words(ids) + self.places(rows) + rows.sin()[:, None] * self.scale
        return (x.tanh() * shown[..., None]).sum(1)


def texts(model, lengths, batches=None):
    """Losses of texts of these lengths, padded to the longest of a batch; and the batches that they are asked for."""
    rows = [torch.arange(length) * (i + 2) % 9 for i, length in enumerate(lengths)]

    def losses_of(some):
        if batches is not None and len(some) > 1:
            batches.append(list(some))
        ids = nn.utils.rnn.pad_sequence([rows[i] for i in some], batch_first=True, padding_value=-1)
        return model(ids.clamp_min(0), ids >= 0).square().sum(1)

    return losses_of


@pytest.mark.parametrize("longest", [0, 7])
def test_lengths_that_were_not_traced_are_exact_wherever_the_longest_example_stands(longest):
    model = Positions()
    with attach(model, per_layer(model), 0.3) as engine:
        engine.trace(texts(model, [5, 3, 4, 2, 5, 1]), range(6))
        for length in (6, 8, 16, 24, 8):
            lengths = [3] * 8
            lengths[longest] = length
            assert_exact(engine, texts(model, lengths), range(8))


def test_an_unknown_call_is_traced_once_more_on_all_examples_of_its_batch_and_then_known():
    model, batches = Positions(), []
    with attach(model, flat(model), 0.3) as engine:
        engine.trace(texts(model, [5, 3, 4, 2, 5, 1]), range(6))
        losses_of = texts(model, [2, 2, 8, 1, 2, 2, 2, 2], batches)
        assert_exact(engine, losses_of, range(8))
        assert len(batches) > 2 and all(set(rows) == set(range(8)) and len(rows) <= 10 for rows in batches)
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
    """A cell that runs as often as the longest example is long."""

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
def test_more_calls_than_traced_are_traced_once_more(make, make_partition):
    model = Steps(make())
    with attach(model, make_partition(model), 0.5) as engine:
        engine.trace(of_rows(model, torch.randn(6, 3, 4)), range(6))
        for steps in (2, 5, 3, 5):
            assert_exact(engine, of_rows(model, torch.randn(6, steps, 4)), range(6), [0.5] * len(engine.groups))
        assert max(len(sites) for label, sites in engine.plan.calls.items() if "cell" in label) >= 5
        with pytest.raises(UntracedCall), engine.forward(6):
            of_rows(model, torch.randn(6, 7, 4))(range(6))


class Masked(nn.Module):
    """A mask that is only there when some example is padded meets a parameter, before the examples do."""

    def __init__(self):
        super().__init__()
        self.layer, self.scale = nn.Linear(4, 4), nn.Parameter(torch.rand(4))

    def forward(self, x: Tensor, shown: Tensor) -> Tensor:
        h = self.layer(x)
        if not bool(shown.all()):
            h = h + (~shown).to(x.dtype).T[..., None].mul(self.scale).transpose(0, 1)
        return (h.tanh() * self.scale * shown[..., None]).sum(1)


@pytest.mark.parametrize("first", ["padded", "whole"])
def test_two_paths_are_both_exact_whichever_was_traced(first):
    model = Masked()
    x, whole = torch.randn(8, 8, 4), torch.ones(8, 8, dtype=torch.bool)
    padded = whole.clone()
    padded[6, 5:] = False

    def losses_of(shown, length):
        return lambda rows: model(x[list(rows), :length], shown[list(rows), :length]).square().sum(1)

    with attach(model, flat(model), 1.0) as engine:
        engine.trace(losses_of({"padded": padded, "whole": whole}[first], 8), [6, *range(5)])
        for length in (7, 8):  # of 8, sizes do not tell which path it is
            for shown, rows in ((whole, 8), (padded, 8), (whole, 4), (padded, 7), (whole, 8), (padded, 8)):
                assert_exact(engine, losses_of(shown, length), range(rows), [1.0])


def test_one_example_alone_needs_no_trace():
    model = Positions()
    with attach(model, per_layer(model), 0.1) as engine:
        assert_exact(engine, texts(model, [4, 9]), [1])
        assert not engine.plan.calls


def test_a_plan_goes_through_a_checkpoint():
    model = Positions()
    with attach(model, flat(model), 0.3) as engine:
        for lengths in ([5, 3, 4, 2, 5, 1], [8, 1]):
            engine.trace(texts(model, lengths), range(len(lengths)))
        state = engine.plan.state_dict()
        assert state["Layer 'places'"] == [[[], [[5], [8]]]]
        assert state["Layer 'words'"] == [[[[0, 1, "GROUPED"]], []]]
        again = ClipPlan.from_state_dict(state)
        assert again == engine.plan
    with attach(model, flat(model), 0.3) as engine:
        engine.plan = again
        with engine.forward(4):
            losses = texts(model, [8] * 4)(range(4))
        engine.backward(losses)


def test_a_site_tells_by_sizes_which_of_its_layouts_an_input_has():
    grouped, second = Layout(0, 3), Layout(1, 1)
    site = CallSite((grouped, second), frozenset({(7, 2)}))
    assert site.find((12, 5), 4) == grouped
    assert site.find((5, 4), 4) == second
    assert site.find((7, 2), 4) == site.find((9, 2), 4) == SHARED
    assert site.find((12, 4), 4) is None, "two fit"
    assert site.find((5, 5, 5), 4) is None and site.find((7, 2, 1), 4) is None, "none fits"
    assert CallSite((Layout(),)).find((9, 1), 3) is None, "one row stays one"


def test_rows_of_an_example_may_be_as_many_as_they_are_once_three_numbers_of_them_were_traced():
    two, three, five = (CallSite((Layout(0, n, Order.TILED),)) for n in (2, 3, 5))
    assert two.find((9, 1), 3) is None and two.joined(three).find((12, 1), 3) is None
    site = two.joined(three).joined(five)
    assert site.find((12, 1), 3) == Layout(0, 4, Order.TILED) and site.find((10, 1), 3) is None
    assert site.joined(CallSite((Layout(0, 7, Order.TILED),))) == site, "nothing new"


def test_plans_are_joined_call_by_call():
    one, two = CallSite((Layout(0, 2),)), CallSite((Layout(0, 2), Layout(1)), frozenset({(3,)}))
    joined = ClipPlan({"a": (one,), "b": (two,)}).joined(ClipPlan({"a": (two, one)}))
    assert joined.calls == {"a": (CallSite((Layout(0, 2), Layout(1)), frozenset({(3,)})), one), "b": (two,)}


class Stateful(nn.Module):
    """Draws random numbers, some from a generator of its own, and counts its calls in a buffer."""

    def __init__(self):
        super().__init__()
        self.layer, self.drop, self.own = nn.Linear(5, 3), nn.Dropout(0.5), torch.Generator()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.layer(self.drop(x + torch.rand(x.shape, generator=self.own)))


def test_a_trace_leaves_gradients_buffers_and_generators_alone():
    model, x = Stateful(), torch.randn(6, 5)
    gradient = model.layer.weight.grad = torch.ones_like(model.layer.weight)
    before, own = torch.get_rng_state(), model.own.get_state()
    with attach(model, flat(model), 1.0) as engine:
        engine.trace(of_rows(model, x), range(6))
        assert model.layer.weight.grad is gradient and bool((gradient == 1).all()) and engine.examples == 0
    assert float(model.calls) == 0
    assert torch.equal(torch.get_rng_state(), before) and torch.equal(model.own.get_state(), own)


NUMBERS = {
    "dropout": lambda x: F.dropout(x, 0.5),
    "slopes": lambda x: F.rrelu(x, training=True),
    "poisson": lambda x: torch.poisson(x.abs()) + x,
    "gamma": lambda x: torch._standard_gamma(x.abs() + 0.1) + x,
    "binomial": lambda x: torch.binomial(x.detach().abs().ceil(), torch.full_like(x, 0.5)) + x,
    "noise": lambda x: x + torch.randn_like(x),
}


class Random(nn.Module):
    """Random numbers of which some follow what they meet, and others that are drawn after them."""

    def __init__(self, draw):
        super().__init__()
        self.first, self.second, self.draw = nn.Linear(4, 6), nn.Linear(6, 2), draw

    def forward(self, x: Tensor) -> Tensor:
        return self.second(F.dropout(self.draw(self.first(x)), 0.2))


@pytest.mark.parametrize("name", NUMBERS)
def test_random_numbers_that_follow_values_are_not_taken_for_mixing(name):
    model, x = Random(NUMBERS[name]), torch.randn(9, 4)
    with attach(model, flat(model), 1.0) as engine:
        for rows in (range(9), [3, 1], [8, 2, 5, 7, 0]):
            engine.trace(of_rows(model, x), rows)
            engine.clip(of_rows(model, x), rows)
            assert engine.plan.calls["Layer 'second'"][0].layouts == (Layout(),)


class Squeezed(nn.Module):
    """Without its batch axis where there is one example."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.layer = nn.Conv1d(2, 3, 2), nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv(x.squeeze(0)).tanh()
        return self.layer(h.flatten(-2)).view(len(x), 4)


def test_a_batch_axis_that_is_squeezed_away_from_one_example_is_put_back():
    model, x = Squeezed(), torch.randn(6, 2, 5)
    with attach(model, flat(model), 0.3) as engine:
        engine.trace(lambda rows: model(x[list(rows)]).square().sum(1), range(6))
        for rows in (range(4), [5], [2]):
            assert_exact(engine, lambda some: model(x[list(some)]).square().sum(1), rows)
