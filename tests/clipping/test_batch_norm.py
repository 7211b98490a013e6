"""BatchNorm in eval mode does not mix examples and is clipped exactly; in training mode it is refused."""

import copy

import pytest
import torch
from torch import Tensor, nn

from groupwise.clipping import attach, flat, per_layer
from groupwise.errors import UserError
from tests.clipping.alone import assert_exact
from tests.clipping.modes import FEW, attached
from tests.clipping.traced import clip, rows_of

BATCH = 6


class Residual(nn.Module):
    """A small residual network as in torchvision, with running statistics of some data."""

    def __init__(self, affine: bool = True, sync: bool = False) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4, affine=affine)
        self.conv2 = nn.Conv2d(4, 4, 3, padding=1, bias=False)
        self.bn2 = nn.SyncBatchNorm(4) if sync else nn.BatchNorm2d(4, affine=affine)
        self.drop, self.pool, self.fc = nn.Dropout(0.5), nn.AdaptiveAvgPool2d(2), nn.Linear(16, 3)
        if not sync:
            self(torch.randn(20, 3, 5, 5) * 2 + 1)
        for bn in (self.bn1, self.bn2):
            for parameter in bn.parameters():
                nn.init.uniform_(parameter, 0.5, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.bn1(self.conv1(x)))
        return self.fc(self.drop(self.pool(torch.relu(x + self.bn2(self.conv2(x)))).flatten(1)))


class NormAndActivation(nn.BatchNorm2d):
    """A subclass with its own forward, as timm's BatchNormAct2d."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(super().forward(x))


def with_activation() -> nn.Module:
    model = Residual()
    for name in ("bn1", "bn2"):
        model.get_submodule(name).__class__ = NormAndActivation
    return model


def freeze_except(model: nn.Module, part: str) -> nn.Module:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(part in name)
    return model


MODELS = {
    "a linear probe": lambda: freeze_except(Residual(), "fc"),
    "all but BatchNorm": lambda: freeze_except(Residual(affine=False), ""),
    "all": Residual,
    "affine parameters only": lambda: freeze_except(Residual(), "bn"),
    "one affine parameter": lambda: freeze_except(Residual(), "bn2.bias"),
    "SyncBatchNorm": lambda: Residual(sync=True),
    "a subclass with an activation": with_activation,
}


@pytest.mark.parametrize("mode", FEW)
@pytest.mark.parametrize("name", MODELS)
def test_eval_mode_is_clipped_exactly(double, name, mode):
    model, x = MODELS[name]().eval(), torch.randn(BATCH, 3, 5, 5)
    buffers, plain = copy.deepcopy(dict(model.named_buffers())), model(x)
    with attached(model, mode) as engine:
        for rows in (range(BATCH), range(4), range(4, BATCH)):
            assert_exact(engine, lambda rows: model(x[list(rows)]).square().sum(1), rows)
    assert all(torch.equal(buffer, buffers[key]) for key, buffer in model.named_buffers())
    assert "forward" not in vars(model.bn1) and torch.equal(model(x), plain)


class Queries(nn.Module):
    """BatchNorm of learned rows that all examples share."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.bn, self.head = nn.Parameter(torch.randn(3, 4)), nn.BatchNorm1d(4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x + self.bn(self.rows).sum(0))


@pytest.mark.parametrize("mode", FEW)
def test_eval_mode_is_exact_for_rows_that_all_examples_share(double, mode):
    model, x = Queries().eval(), torch.randn(BATCH, 4)
    with attached(model, mode) as engine:
        assert_exact(engine, lambda rows: model(x[list(rows)]).square().sum(1), range(BATCH))


@pytest.mark.parametrize("affine", [True, False])
def test_training_mode_is_refused(affine):
    model = freeze_except(Residual(affine), "fc")
    with pytest.raises(UserError, match=r"'bn1' \(BatchNorm2d\) mixes the examples .* call .eval\(\) on it before"):
        per_layer(model)
    model.eval().bn2.train()
    with pytest.raises(UserError, match="'bn2'"):
        attach(model, flat(model), 1.0)


def test_missing_running_statistics_are_refused_even_in_eval_mode():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, track_running_stats=False)).eval()
    with pytest.raises(UserError, match=r"'1' \(BatchNorm1d\) mixes the examples .* bounded: replace it"):
        per_layer(model)


@pytest.mark.parametrize(
    ("trained", "compiled", "mode"),
    [("fc", False, "flat"), ("bn", False, "flat"), ("fc", True, "flat"), ("fc", False, "direct")],
)
def test_switch_to_training_mode_is_refused_at_the_next_step(trained, compiled, mode):
    model, x = freeze_except(Residual(), trained).eval(), torch.randn(BATCH, 3, 5, 5)
    with attached(model, mode) as engine:
        run = torch.compile(model, backend="eager") if compiled else model
        losses_of = rows_of(lambda x: run(x).sum(1), x)
        clip(engine, losses_of, range(BATCH))
        trains = [p for p in model.parameters() if p.requires_grad]
        before = [p.grad.clone() for p in trains]
        model.train()
        for refused in (engine.clip, engine.trace):
            with pytest.raises(UserError, match=r"'bn1' \(BatchNorm2d\) mixes"):
                refused(losses_of, range(BATCH))
        assert all(torch.equal(p.grad, b) for p, b in zip(trains, before, strict=True))
        model.bn1.eval(), model.bn2.eval()
        engine.clip(losses_of, range(BATCH))  # dropout may stay in training mode
        model.train()(x).sum().backward()  # outside the engine's passes it is allowed
