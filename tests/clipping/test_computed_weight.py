"""Layers under `weight_norm`, beside what every layer is held to: forms, refusals, sizes, rounding."""

import copy
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import orthogonal, spectral_norm, weight_norm

from groupwise.clipping import attach, flat, per_layer
from groupwise.clipping.reference import clipped_sums
from groupwise.clipping.rules import find_rule
from tests.clipping.largest import Largest
from tests.clipping.traced import clip_batch, trace_batch


def losses_of(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).flatten(1).sin().sum(1)


def assert_exact(model: nn.Module, x: Tensor, **options: str) -> None:
    """Norms and clipped sums of one group are those of a loop over the four examples."""
    truth = clipped_sums(model, lambda i: losses_of(model, x[[i]])[0], range(4), flat(model), [0.5])
    with attach(model, flat(model), 0.5, **options) as engine:
        clip_batch(engine, partial(losses_of, model), x)
        torch.testing.assert_close(engine.per_example_norms, truth.norms, rtol=1e-7, atol=0)
    for key, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, truth.sums[key], rtol=1e-9, atol=1e-12)


def test_weight_and_what_it_is_computed_from_are_one_group():
    model = nn.Sequential(weight_norm(nn.Linear(5, 4)), nn.Linear(4, 3))
    assert [group.layers for group in per_layer(model)] == [("0",), ("1",)]
    with attach(model, per_layer(model), 1.0) as engine:
        assert sorted(engine.groups[0].names) == sorted(n for n, _ in model.named_parameters() if n.startswith("0"))


@pytest.mark.parametrize(
    "make",
    [
        lambda: weight_norm(nn.Linear(5, 4), dim=1),
        lambda: weight_norm(nn.ConvTranspose2d(5, 4, 3)),
        lambda: weight_norm(nn.Linear(5, 4), dim=None),
        lambda: spectral_norm(nn.Linear(5, 4)),
        lambda: spectral_norm(weight_norm(nn.Linear(5, 4))),
        lambda: orthogonal(nn.Linear(5, 4)),
        lambda: weight_norm(nn.Linear(5, 4), "bias"),
        lambda: weight_norm(spectral_norm(nn.Linear(5, 4), "weight"), "bias"),
    ],
)
def test_other_computations_have_no_rule(make):
    assert find_rule(make()) is None


@pytest.mark.parametrize("norms", ["bookkeeping", "ghost"])
def test_a_computed_weight_that_the_model_reads_too_is_exact(norms, double):
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = weight_norm(nn.Linear(5, 5))

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) @ self.layer.weight

    assert_exact(Tied(), torch.randn(4, 5), norms=norms)


def test_no_examples_gradient_is_formed_for_vectors():
    model = nn.Sequential(weight_norm(nn.Linear(40, 40)), nn.Tanh(), nn.Linear(40, 2)).eval()
    x = torch.randn(16, 40)
    for make_partition in (per_layer, flat):
        with attach(model, make_partition(model), 1.0) as engine:
            trace_batch(engine, partial(losses_of, model), x)
            with Largest() as largest:
                clip_batch(engine, partial(losses_of, model), x)
        assert largest.numbers <= 2 * 40 * 40 < 16 * 40 * 40


@pytest.mark.parametrize("formula", ["gram", "materialize"])
@pytest.mark.parametrize("positions", [1, 4])
def test_rounding_understates_no_norm_where_all_is_removed(positions, formula):
    """The output gradient leads along the weight itself, of which the map leaves almost nothing."""
    torch.manual_seed(0)
    layer = weight_norm(nn.Linear(8, 8, bias=False)).eval()
    exact = copy.deepcopy(layer).double()
    for each in (layer, exact):
        for key, parameter in each.named_parameters():
            parameter.requires_grad_("original0" not in key)
    unit = exact.weight.detach() / exact.weight.detach().norm(dim=1, keepdim=True)
    x = (100 * unit[3] + 1e-3 * torch.randn(6, positions, 8)).float()
    slopes = torch.zeros(8)
    slopes[3] = 1.0

    def losses(model: nn.Module, x: Tensor) -> Tensor:
        return (model(x) * slopes.to(x.dtype)).flatten(1).sum(1)

    if formula == "gram" or positions == 1:
        truth = clipped_sums(exact, lambda i: losses(exact, x[[i]].double())[0], range(6), flat(exact), [1.0])
        with attach(layer, flat(layer), 1.0, formula=formula) as engine:
            clip_batch(engine, partial(losses, layer), x)
            assert bool((engine.per_example_norms >= truth.norms * (1 - 1e-5)).all())
    for row in x:
        layer.zero_grad()
        with attach(layer, flat(layer), 1e-6, formula=formula) as engine:
            clip_batch(engine, partial(losses, layer), row.unsqueeze(0))
        squares = sum(float(p.grad.double().square().sum()) for p in layer.parameters() if p.grad is not None)
        assert squares**0.5 <= 1e-6 * (1 + 1e-6)


@pytest.mark.parametrize("formula", ["gram", "materialize"])
@pytest.mark.parametrize("order", ["sequences first", "two rows together", "one row after the other"])
def test_rows_of_every_layout(order, formula, double):
    class Rows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = weight_norm(nn.Linear(5, 4))

        def forward(self, x: Tensor) -> Tensor:
            if order == "sequences first":
                return self.layer(x.transpose(0, 1)).transpose(0, 1)
            if order == "two rows together":
                return self.layer(x.flatten(0, 1)).unflatten(0, (len(x), 2))
            return torch.stack(self.layer(torch.cat(x.unbind(1))).chunk(2), 1)

    assert_exact(Rows(), torch.randn(4, 2, 5), formula=formula)
