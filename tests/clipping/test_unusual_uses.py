"""Layers on rows that the data choose, and parameters in custom operations: exact, or refused by name."""

import pytest
import torch
from torch import nn

from groupwise.clipping import attach, flat, verify
from groupwise.errors import UserError
from tests.clipping.alone import assert_exact
from tests.clipping.modes import FEW, attached
from tests.clipping.test_per_example import Uses
from tests.clipping.traced import clip, clip_batch

pytestmark = pytest.mark.usefixtures("double")


class Chosen(nn.Module):
    """Only the marked tokens go through the layer `expert`."""

    def __init__(self):
        super().__init__()
        self.below, self.expert, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x, marked):
        rows, where = self.below(x).reshape(-1, 4), marked.reshape(-1).nonzero().flatten()
        return self.head(rows.index_add(0, where, self.expert(rows[where])).reshape(x.shape).mean(1))


def marks(*counts):
    return torch.arange(4) < torch.tensor(counts)[:, None]


@pytest.mark.parametrize("tokens", [(4, 4, 0, 0), (4, 0, 0, 0), (1, 3, 3, 1), (1, 1, 3, 1), (4, 0, 0, 1), (3, 3, 2, 1)])
def test_rows_that_the_data_choose_are_refused(tokens):
    model, x = Chosen(), torch.randn(4, 4, 4)

    def losses_of(marked):
        return lambda rows: model(x[list(rows)], marked[list(rows)]).square().sum(1)

    refused = pytest.raises(UserError, match=r"'expert' .* freeze the layer")
    if tokens in ((4, 4, 0, 0), (4, 0, 0, 0), (1, 3, 3, 1), (1, 1, 3, 1)):
        message = r"'expert' .* the rows depend on the data.* freeze the layer"
        with attach(model, flat(model), 1.0) as engine, pytest.raises(UserError, match=message):
            engine.trace(losses_of(marks(*tokens)), range(4))
    with attach(model, flat(model), 1.0) as engine:  # the trace passes if all tokens are marked
        assert_exact(engine, losses_of(marks(4, 4, 4, 4)), range(4))
        with refused:
            engine.clip(losses_of(marks(*tokens)), range(4))


class Tripled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight):
        return 3 * weight

    @staticmethod
    def backward(ctx, g):
        return 3 * g


@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated")
def test_attributes_set_by_hooks_are_plain_tensors_after_a_pass():
    model, x = nn.Sequential(nn.utils.weight_norm(nn.Linear(3, 2))), torch.randn(4, 3)
    with attach(model, flat(model), 0.1) as engine:
        clip(engine, lambda rows: model(x[list(rows)]).square().sum(1), range(4))
    assert type(model[0].weight) is torch.Tensor


def in_place(weight):
    rows = torch.zeros(2, 5, dtype=weight.dtype)
    rows[0] = weight
    return rows.sum(0)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (Tripled.apply, "Parameter 'p' goes into Tripled, a torch.autograd.Function"),
        (in_place, r"Parameter 'p' is written in place \(by __setitem__\) .*index_put"),
    ],
)
def test_unsupported_operations_on_parameters_are_refused_by_name(function, message):
    model = Uses((5,), lambda p, layer, x: layer(x) * function(p))
    with attach(model, flat(model), 1.0) as engine, pytest.raises(UserError, match=message):
        clip_batch(engine, lambda x: model(x).sum(1), torch.rand(3, 5))


@pytest.mark.parametrize("rate", [0.0, 0.5])
def test_verify_passes_a_model_with_two_tiled_rows_per_example(rate):
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(rate), nn.Linear(8, 4))
    left, right = torch.randn(8, 4), torch.randn(8, 4)

    def losses_of(rows):
        one, other = model(torch.cat([left[list(rows)], right[list(rows)]])).chunk(2)
        return (one * other).sum(1)

    with attach(model, flat(model), 0.1) as engine:
        assert verify(engine, losses_of, range(8)) < 1e-9


@pytest.mark.parametrize("tokens", [0, 1, 3])
def test_one_example_alone_is_exact_with_few_or_no_expert_tokens(tokens):
    model, x = Chosen(), torch.randn(1, 4, 4)
    with attach(model, flat(model), 1.0) as engine:
        assert_exact(engine, lambda rows: model(x, marks(tokens)).sum(1), [0])


@pytest.mark.parametrize("mode", FEW)
def test_a_call_without_effect_leaves_shared_weights_clipped_exactly(mode):
    first, second = layers = nn.ModuleList(nn.Linear(6, 6, bias=False) for _ in range(2))
    x = torch.randn(5, 3, 6)

    def losses_of(rows):
        second(x[list(rows)])  # without effect
        return second(torch.tanh(first(x[list(rows)]) @ first.weight)).square().sum((1, 2))

    with attached(layers, mode, 0.1) as engine:
        assert_exact(engine, losses_of, range(5))
