"""A copy of an attached model, or of a part of it, is a plain model, and the attached one stays as it was."""

import copy
import functools
import inspect
import io
import pickle

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from groupwise.clipping import attach, flat, per_layer
from tests.clipping.conftest import Scale
from tests.private_use import MICROBATCH, Use


class Network(nn.Module):
    """A layer of every kind of treatment: by a rule, run as linear layers, with copies, and without parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.scale, self.drop, self.head = nn.LSTM(4, 5, batch_first=True), Scale(5), nn.Dropout(0.5), None
        self.shift = nn.Parameter(torch.ones(5))
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor, times: int = 1) -> Tensor:
        return self.head(self.drop(self.scale(self.rnn(x)[0][:, -1]) + self.shift)) * times


def pickled(model: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(model))


def saved(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=False)


WAYS = {"deepcopy": copy.deepcopy, "pickle": pickled, "torch.save": saved}


@pytest.fixture(params=WAYS)
def copied(request, double):
    return WAYS[request.param]


def drawn(model: nn.Module, x: Tensor) -> Tensor:
    torch.manual_seed(1)
    return model(x)


def gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(drawn(model, x).square().sum(), list(model.parameters())))


@pytest.mark.parametrize("trains", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("direct", [False, True], ids=["groups", "direct"])
def test_it_computes_as_its_class_does(copied, trains, direct):
    model = (nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5), nn.Linear(3, 3)) if direct else Network()).train(trains)
    plain, x = copy.deepcopy(model), torch.randn(*((6, 4) if direct else (6, 2, 4)))
    with attach(model, per_layer(model), 0.5, direct=direct) as engine:
        twin = copied(copied(model))
        assert twin.training is trains
        assert all(type(p) is nn.Parameter for p in twin.parameters())
        assert not {id(p) for p in twin.parameters()} & {id(p) for p in model.parameters()}
        for one, other in zip(gradients(twin, x), gradients(plain, x), strict=True):
            assert torch.equal(one, other)
        engine.backward(drawn(model, x).square().sum(1))
        summed = [p.grad for p in model.parameters()]
        model.zero_grad()
    assert all(p.grad is None for p in twin.parameters())
    with attach(plain, per_layer(plain), 0.5, direct=direct) as engine:
        engine.backward(drawn(plain, x).square().sum(1))
        assert all(torch.equal(p.grad, s) for p, s in zip(plain.parameters(), summed, strict=True))
    with attach(twin, per_layer(twin), 0.5, direct=direct) as engine, torch.no_grad():  # as any model's
        assert engine.model is twin
        assert torch.equal(drawn(copied(twin), x), drawn(plain, x))
    assert torch.equal(drawn(twin, x), drawn(plain, x))


def test_a_part_of_it_is_plain_too(copied):
    model, x = Network(), torch.randn(6, 5)
    with attach(model, flat(model), 1.0):
        for part in (model.head, model.scale):
            twin = copied(part)
            assert all(p.grad is None and type(p) is nn.Parameter for p in twin.parameters())
            twin(x).sum().backward()  # an engine's layers would refuse
            assert all(p.grad is not None for p in twin.parameters())
        assert list(inspect.signature(model.forward).parameters) == ["x", "times"]
        assert copied(model.head.forward)(x).shape == (6, 3)


def doubled(module: nn.Module, x: Tensor) -> Tensor:
    return 2 * type(module).forward(module, x)


def test_a_forward_that_the_model_had_of_its_own_is_copied_as_without_an_engine(copied):
    model, x = Network(), torch.randn(6, 2, 4)
    model.forward = functools.update_wrapper(functools.partial(doubled, model), model.forward)  # as accelerate does
    plain = copy.deepcopy(model).eval()
    expected = plain(x)
    assert torch.equal(expected, 2 * type(plain).forward(plain, x))
    with attach(model.eval(), flat(model), 1.0):
        twin = copied(model)
        with torch.no_grad():
            twin.head.bias.add_(1)
        assert not torch.equal(twin(x), expected), "it is bound to the copy"
        assert torch.equal(copied(model)(x), expected)
    assert torch.equal(model(x), expected)


def test_averages_of_a_model_in_private_training_are_plain_models():
    use = Use()
    average = AveragedModel(use.model)
    for x, y in use.private.batches(MICROBATCH):
        use.private.backward(use.losses(x, y))
        if use.private.step():
            average.update_parameters(use.model)
    again = Use(model=copy.deepcopy(average.module))  # which may train privately itself
    again.train(1)
    use.private.detach()
    assert not torch.equal(average(x), use.model(x))
    average.module.load_state_dict(use.model.state_dict())
    assert torch.equal(average(x), use.model(x))
    assert torch.equal(use.weights, Use().train().weights)
