"""`fix_model` replaces layers that mix examples, keeps their weights, and describes each change."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import groupwise
from groupwise.errors import UserError
from tests.private_use import Use


def network(norm: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 16, 3), norm, nn.ReLU(), nn.Flatten(), nn.LazyLinear(2))


def train(model: nn.Module) -> None:
    x, y = torch.randn(40, 3, 8, 8), torch.randint(2, (40,))
    model(x)
    Use(model, TensorDataset(x, y)).train()


@pytest.mark.parametrize(
    ("channels", "groups"), [(16, 4), (128, 32), (256, 32), (6, 1), (3, 1), (24, 6), (1, 1), (7, 1), (14, 2)]
)
def test_batch_norm_becomes_group_norm_with_its_own_parameters(channels, groups):
    norm = nn.BatchNorm2d(channels, eps=1e-3)
    norm.weight.data.uniform_()
    model = nn.Sequential(nn.Conv2d(3, channels, 1), norm)
    assert groupwise.fix_model(model) == [
        f"1: BatchNorm2d({channels}) became GroupNorm({groups}, {channels}); weight and bias are kept."
    ]
    assert type(model[1]) is nn.GroupNorm and model[1].num_groups == groups and model[1].eps == 1e-3
    assert model[1].weight is norm.weight and model[1].bias is norm.bias and model[1].training
    x = torch.randn(5, 3, 4, 4)
    assert torch.equal(model[1](x := model[0](x)), F.group_norm(x, groups, norm.weight, norm.bias, 1e-3))
    assert groupwise.fix_model(model) == []


@pytest.mark.parametrize(
    "norm",
    [
        nn.BatchNorm2d(16),
        nn.BatchNorm2d(16, affine=False),
        nn.BatchNorm2d(16, track_running_stats=False),
        nn.SyncBatchNorm(16),
    ],
    ids=str,
)
def test_a_model_that_was_refused_trains_after_fix_model(norm):
    model = network(norm)
    with pytest.raises(UserError, match="mixes the examples"):
        train(model)
    assert len(groupwise.fix_model(model)) == 1
    train(model)


def test_dropped_running_statistics_are_mentioned():
    model = network(nn.BatchNorm2d(16))
    model(torch.randn(4, 3, 8, 8))
    assert "mean and variance are dropped" in groupwise.fix_model(model)[0]


def test_batch_norm_in_eval_mode_is_kept_if_it_has_running_statistics():
    model = network(nn.BatchNorm2d(16))
    model[1].eval()
    assert groupwise.fix_model(model) == [] and type(model[1]) is nn.BatchNorm2d
    model[1].track_running_stats, model[1].running_mean, model[1].running_var = False, None, None
    assert len(groupwise.fix_model(model)) == 1 and not model[1].training  # uses batch statistics even in eval mode


def test_a_shared_layer_is_replaced_by_one_shared_layer():
    model = nn.ModuleDict({"a": nn.Sequential(nn.BatchNorm1d(8)), "b": nn.Identity()})
    model["b"] = model["a"][0]
    changes = groupwise.fix_model(model)
    assert [sentence.partition(":")[0] for sentence in changes] == ["a.0", "b"] and model["b"] is model["a"][0]


def test_an_existing_optimizer_still_holds_the_models_parameters():
    model = network(nn.BatchNorm2d(16))
    model(torch.randn(4, 3, 8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    groupwise.fix_model(model)
    moved = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    assert moved == {id(parameter) for parameter in model.parameters()}


class WithActivation(nn.BatchNorm2d):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).relu()


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nn.Sequential(nn.BatchNorm1d(4), WithActivation(4)), "is a subclass"),
        (nn.Sequential(nn.BatchNorm1d(4), nn.LazyBatchNorm1d()), "is a subclass of BatchNorm"),
    ],
)
def test_subclasses_of_batch_norm_are_refused_and_the_model_is_unchanged(model, message):
    before = [type(module) for module in model.modules()]
    with pytest.raises(UserError, match=message):
        groupwise.fix_model(model)
    assert [type(module) for module in model.modules()] == before
