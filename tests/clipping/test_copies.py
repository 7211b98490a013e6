"""A copy of an attached model is a plain model, and the attached one stays as it was."""

import copy
import io
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import TensorDataset

from groupwise import make_private
from groupwise.clipping import attach, per_layer
from groupwise.privacy import NoiseSource
from tests.clipping.conftest import Scale
from tests.clipping.traced import clip_batch


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


def drawn(model: nn.Module, x: Tensor) -> Tensor:
    torch.manual_seed(1)
    return model(x).square().sum(1)


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled, saved])
@pytest.mark.parametrize("direct", [False, True], ids=["groups", "direct"])
def test_it_computes_as_its_class_does_and_can_be_attached_itself(double, copied, direct):
    model = nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5), nn.Linear(3, 3)) if direct else Network()
    x = torch.randn(*((6, 4) if direct else (6, 2, 4)))
    plain = [torch.autograd.grad(drawn(model, x).sum(), list(model.parameters()))]
    with attach(model, per_layer(model), 0.5, direct=direct) as engine:
        clip_batch(engine, lambda x: drawn(model, x), x)
        twin = copied(model)
        twin.zero_grad()
        plain.append(torch.autograd.grad(drawn(twin, x).sum(), list(twin.parameters())))
        with attach(twin, per_layer(twin), 0.5, direct=direct) as second:
            clip_batch(second, lambda x: drawn(twin, x), x)
    assert all(torch.equal(one, other) for one, other in zip(*plain, strict=True))
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert type(other) is nn.Parameter and one is not other
        assert torch.equal(one.grad, other.grad)


def test_averages_of_a_model_in_private_training_are_plain_models():
    data = TensorDataset(torch.randn(40, 5), torch.randint(0, 2, (40,)))

    def losses(model: nn.Module, batch: list[Tensor]) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1], reduction="none")

    def trained(model: nn.Module, average: AveragedModel | None = None) -> nn.Module:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        options = {"noise_multiplier": 1.0, "steps": 3, "batch_size": 20, "accountant": "rdp", "delta": 1e-3}
        private = make_private(model, optimizer, data, losses, noise_source=NoiseSource.from_seed(3), **options)
        for _ in private.steps():
            if average is not None:
                average.update_parameters(model)
        return model

    start, x = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 2)), data.tensors[0]
    model = copy.deepcopy(start)
    average = AveragedModel(model)
    trained(model, average)
    trained(copy.deepcopy(average.module))  # it may train privately itself
    assert not torch.equal(average(x), model(x))
    average.module.load_state_dict(model.state_dict())
    assert torch.equal(average(x), model(x))
    assert torch.equal(trained(copy.deepcopy(start))(x), model(x))
