"""Cases at the edge that mutants of the engine have asked for."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from groupwise.clipping import attach, flat, per_layer
from groupwise.clipping.rules.embedding import EmbeddingRule
from groupwise.errors import UserError
from tests.clipping.alone import assert_exact, assert_sums, gradients
from tests.clipping.modes import FEW, attached
from tests.clipping.traced import clip_batch, trace_batch


class LastOutput(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.LSTM(3, 2, batch_first=True)

    def forward(self, x):
        return self.layer(x)[0][:, -1]


@pytest.mark.parametrize("make_model", [lambda: nn.Linear(3, 2), LastOutput, lambda: nn.LayerNorm(3)])
@pytest.mark.parametrize("make_partition", [flat, per_layer])
def test_clipped_gradients_have_no_gradients_of_their_own(make_model, make_partition):
    model, x = make_model(), torch.randn(4, 5, 3)
    with attach(model, make_partition(model), 1.0) as engine:
        trace_batch(engine, lambda x: model(x).flatten(1).sum(1), x)
        with engine.forward(4):
            losses = model(x).sum()
        with pytest.raises(UserError, match="create_graph"):
            losses.backward(create_graph=True)


@pytest.mark.parametrize("make_partition", [flat, per_layer])
def test_losses_of_derivatives_by_the_input_are_refused_and_finite_differences_are_exact(make_partition, double):
    model, x, step = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1)), torch.randn(3, 2), 1e-3

    def differences(examples):
        return ((model(x[examples] + step) - model(x[examples] - step)) / (2 * step)).square()[:, 0]

    def derivatives(examples):
        at = x[examples].requires_grad_()
        return torch.autograd.grad(model(at).sum(), at, create_graph=True)[0].square().sum(1)

    with attach(model, make_partition(model), 0.1) as engine:
        assert_exact(engine, differences, [0, 1, 2])
        expected = gradients(model)
        for refused in (engine.trace, engine.clip):
            with pytest.raises(UserError, match=r"derivatives of the model by its input.*finite differences"):
                refused(derivatives, [0, 1, 2])
        assert_sums(model, expected, 0, 0)


def test_a_norm_that_equals_the_threshold_is_within_it():
    model = nn.Linear(1, 1, bias=False)
    with attach(model, flat(model), 3.0) as engine:
        clip_batch(engine, lambda x: model(x).sum(1), torch.tensor([[2.0], [3.0], [3.5]]))
        assert engine.counts.tolist() == [2]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("mode", FEW)
def test_an_example_that_is_not_finite_counts_for_nothing_in_layers_that_exchange_and_normalise(
    mode, checkpointed, bad
):
    torch.manual_seed(0)
    layers = (
        nn.ConvTranspose2d(3, 4, 3, 2),
        nn.InstanceNorm2d(4, affine=True),
        nn.RMSNorm(7),
        nn.ConvTranspose2d(4, 2, 2),
    )
    model, x = nn.Sequential(*layers), torch.randn(5, 3, 3, 3)
    sums = []
    for rows in (x[[0, 1, 3, 4]], x.index_fill(0, torch.tensor([2]), bad)):
        model.zero_grad()
        with attached(model, mode, 0.5) as engine:
            run = partial(checkpoint, model, use_reentrant=False) if checkpointed else model
            clip_batch(engine, lambda x, run=run: run(x).flatten(1).square().sum(1), rows)
        sums.append(gradients(model))
    torch.testing.assert_close(*sums, rtol=1e-4, atol=1e-6)


def test_gradients_of_an_embedding_have_a_row_an_example():
    ids, g = torch.tensor([[1, 1, 0], [4, 2, 4]]), torch.randn(2, 3, 3)
    (rows,) = EmbeddingRule(nn.Embedding(5, 3)).per_example_gradients((ids,), g, (True,))
    torch.testing.assert_close(rows, torch.einsum("btv,btd->bvd", F.one_hot(ids, 5).float(), g))
