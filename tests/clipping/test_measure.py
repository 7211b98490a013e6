"""Gradient norms for a look: equal to a loop over examples, and the model is as it was."""

import random
from contextlib import nullcontext

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import groupwise
from groupwise.clipping import attach, by_mapping, flat, gradient_norms, per_layer
from groupwise.errors import UserError
from tests.clipping.test_trace_plan import Positions, texts

EXAMPLES = 9


class Convolutional(nn.Module):
    """Layers with rules and without one (PReLU, a bare parameter)."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.GroupNorm(2, 6), nn.PReLU(6), nn.Conv2d(6, 4, 2))
        self.scale, self.head = nn.Parameter(torch.randn(4, 1, 1)), nn.Linear(36, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.silu(self.body(x) * self.scale).flatten(1))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.places = nn.Linear(4, 8), nn.Parameter(torch.randn(1, 5, 8))
        self.block = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.block(self.embed(x) + self.places).mean(1))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.lstm, self.head = nn.Embedding(11, 6), nn.LSTM(6, 5, batch_first=True), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(self.embed(x))[0][:, -1])


class SequenceFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.lstm, self.head = nn.Embedding(11, 6), nn.LSTM(6, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(self.embed(x))[0][-1])


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.inner, self.head = nn.Embedding(11, 6), nn.Linear(6, 6), nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.inner(self.embed(x)))).mean(1)


INPUTS = {
    Convolutional: lambda: torch.randn(EXAMPLES, 3, 4, 4),
    Transformer: lambda: torch.randn(EXAMPLES, 5, 4),
    Recurrent: lambda: torch.randint(11, (EXAMPLES, 4)),
    Tied: lambda: torch.randint(11, (EXAMPLES, 4)),
}


def problem(kind=Transformer):
    torch.manual_seed(0)
    model, x, y = kind().double(), INPUTS[kind](), torch.arange(EXAMPLES) % 3
    x = x.double() if x.is_floating_point() else x
    return model, lambda rows: F.cross_entropy(model(x[rows]), y[rows], reduction="none")


def gradients_by_hand(model, losses):
    """Name of a parameter -> its gradient for each example, (n, *shape), by a loop."""
    names, parameters = zip(*model.named_parameters(), strict=True)
    found = [torch.autograd.grad(losses([i]).sum(), parameters) for i in range(EXAMPLES)]
    return {name: torch.stack(rows).detach() for name, rows in zip(names, zip(*found, strict=True), strict=True)}


def norms_by_hand(model, losses, partition):
    places = {id(parameter): name for name, parameter in model.named_parameters()}
    each = gradients_by_hand(model, losses)
    norms = {}
    for group in partition:
        own = {
            places[id(p)] for layer in group.layers for p in model.get_submodule(layer).parameters(recurse=False)
        }  # a parameter that two layers share is one
        norms[group.name] = sum(each[name].flatten(1).square().sum(1) for name in own).sqrt().double()
    return norms


@pytest.mark.parametrize("kind", INPUTS)
@pytest.mark.parametrize("of", [per_layer, flat])
def test_norms_equal_a_loop_over_examples(kind, of):
    model, losses = problem(kind)
    expected = norms_by_hand(model, losses, of(model))
    found = gradient_norms(model, losses, range(EXAMPLES), of(model), microbatch=4)
    assert list(found) == list(expected)
    for name, norms in found.items():
        torch.testing.assert_close(norms, expected[name], rtol=1e-9, atol=1e-12)


def test_groups_may_be_ones_own_and_a_layer_is_one_by_default():
    model, losses = problem()
    groups = by_mapping(model, {"block*": "block", "*": "rest"})
    assert list(gradient_norms(model, losses, range(EXAMPLES), groups)) == [group.name for group in groups]
    assert list(gradient_norms(model, losses, range(EXAMPLES))) == [group.name for group in per_layer(model)]


def test_sequences_may_come_first():
    torch.manual_seed(0)
    model, x, y = SequenceFirst().double(), INPUTS[Recurrent]().t(), torch.arange(EXAMPLES) % 3

    def losses(rows):
        return F.cross_entropy(model(x[:, rows]), y[rows], reduction="none")

    expected = norms_by_hand(model, losses, per_layer(model))
    for name, norms in gradient_norms(model, losses, range(EXAMPLES)).items():
        torch.testing.assert_close(norms, expected[name], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("examples", "microbatch"), [([], 4), ([3], 4), ([3, 1, 3], 1), ([5, 0, 5, 2], 3)])
def test_no_examples_one_alone_and_some_twice(examples, microbatch):
    model, losses = problem()
    expected = norms_by_hand(model, losses, flat(model))["all"][examples]
    found = gradient_norms(model, losses, examples, flat(model), microbatch=microbatch)["all"]
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=0)


def test_texts_of_any_length_are_measured():
    torch.manual_seed(0)
    model = Positions().double()
    losses = texts(model, [5, 2, 8, 3, 7, 1, 4, 8, 6])
    expected = torch.cat([gradient_norms(model, losses, [i], flat(model))["all"] for i in range(EXAMPLES)])
    found = gradient_norms(model, losses, range(EXAMPLES), flat(model), microbatch=4)["all"]
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=0)


class Careless(nn.Module):
    """Draws random numbers of every kind, and counts its calls in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.drop = nn.Linear(5, 3), nn.Dropout(0.5)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.layer(self.drop(x)) * (1 + random.random() + np.random.rand())


def everything(model):
    state = np.random.get_state()
    return {
        "torch": torch.get_rng_state(),
        "numpy": torch.tensor([*state[1].tolist(), state[2]]),
        "python": torch.tensor(random.getstate()[1]),
        **{name: value.clone() for name, value in model.state_dict().items()},
    }


@pytest.mark.parametrize("fails", [False, True])
def test_the_model_is_untouched(fails):
    torch.manual_seed(0)
    model, x = Careless(), torch.randn(EXAMPLES, 5)
    model.layer.weight.grad = gradient = torch.ones_like(model.layer.weight)
    forwards = [dict(module.__dict__).get("forward") for module in model.modules()]

    def losses(rows):
        if fails and 8 in rows:
            raise LookupError
        return model(x[rows]).sum(1)

    before = everything(model)
    with pytest.raises(LookupError) if fails else nullcontext():
        gradient_norms(model, losses, range(EXAMPLES), microbatch=4)
    after = everything(model)
    assert [name for name in before if not torch.equal(before[name], after[name])] == []
    assert model.layer.weight.grad is gradient and bool((gradient == 1).all()) and model.layer.bias.grad is None
    assert [module.__dict__.get("forward") for module in model.modules()] == forwards


def test_a_mistake_is_a_sentence_and_leaves_the_model_free():
    model, losses = problem()
    with pytest.raises(UserError, match="one value per example"):
        gradient_norms(model, lambda rows: losses(rows).mean(), range(9))
    with pytest.raises(UserError, match="one value per example"):
        gradient_norms(model, lambda rows: losses(rows).mean(), [0])
    with attach(model, flat(model), 1.0) as engine:
        engine.trace(losses, range(9))
        with pytest.raises(UserError, match="replaced already"), engine.forward(2):
            gradient_norms(model, losses, [0])
        assert len(gradient_norms(model, losses, range(9))["head"]) == 9, "between the passes of another engine"


def test_the_package_offers_them():
    assert groupwise.gradient_norms is gradient_norms
