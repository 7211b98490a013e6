"""Gradient norms for a look: equal to a loop over examples, and nothing is left behind."""

import pytest
import torch
import torch.nn.functional as F

from groupwise.clipping import flat, gradient_norms
from groupwise.errors import UserError


def problem():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 3)).double()
    x, y = torch.randn(9, 5, dtype=torch.float64), torch.arange(9) % 3
    return model, x, y, lambda rows: F.cross_entropy(model(x[rows]), y[rows], reduction="none")


def by_hand(model, losses, layer):
    norms = []
    for example in range(9):
        gradients = torch.autograd.grad(losses([example]).sum(), list(layer.parameters()))
        norms.append(sum(g.square().sum() for g in gradients).sqrt())
    return torch.stack(norms)


def test_norms_of_each_layer_equal_a_loop_over_examples():
    model, _, _, losses = problem()
    found = gradient_norms(model, [[0, 1, 2, 3], [4, 5, 6, 7], [8]], losses)
    assert list(found) == ["0", "2"]
    for name, layer in (("0", model[0]), ("2", model[2])):
        torch.testing.assert_close(found[name], by_hand(model, losses, layer), rtol=1e-9, atol=1e-12)


def test_groups_may_be_given():
    model, _, _, losses = problem()
    (norms,) = gradient_norms(model, [range(9)], losses, flat(model)).values()
    torch.testing.assert_close(norms, by_hand(model, losses, model), rtol=1e-9, atol=1e-12)


def test_gradients_are_as_before_and_nothing_stays_attached():
    model, x, y, losses = problem()
    model[0].weight.grad = before = torch.ones_like(model[0].weight)
    gradient_norms(model, [range(9)], losses)
    assert model[0].weight.grad is before
    assert model[0].bias.grad is None
    plain = torch.autograd.grad(losses(range(9)).sum(), model[2].weight)[0]
    torch.testing.assert_close(
        plain, torch.autograd.grad(F.cross_entropy(model(x), y, reduction="sum"), model[2].weight)[0]
    )


def test_a_mistake_leaves_the_model_free():
    model, _, _, losses = problem()
    with pytest.raises(UserError):
        gradient_norms(model, [range(9)], lambda rows: losses(rows).mean())
    assert len(gradient_norms(model, [range(9)], losses)["0"]) == 9


def test_without_examples_there_are_no_norms():
    model, _, _, losses = problem()
    found = gradient_norms(model, [], losses)
    assert {name: norms.shape for name, norms in found.items()} == {"0": (0,), "2": (0,)}
