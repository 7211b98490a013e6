"""BatchNorm in eval mode maps each example alone and is exact; whatever would mix a batch by it is refused."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from groupwise import make_private
from groupwise.clipping import attach, flat, per_layer, verify
from groupwise.errors import UserError
from tests.clipping.alone import assert_exact
from tests.clipping.traced import clip_batch, rows_of

BATCH = 6


class Residual(nn.Module):
    """A small residual network as torchvision's are, whose statistics have seen some data."""

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
    """A subclass with a forward of its own, as timm's BatchNormAct2d."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(super().forward(x))


def with_activation() -> nn.Module:
    model = Residual()
    for name in ("bn1", "bn2"):
        model.get_submodule(name).__class__ = NormAndActivation
    return model


def freeze(model: nn.Module, but: str) -> nn.Module:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(but in name)
    return model


MODELS = {
    "a linear probe": lambda: freeze(Residual(), "fc"),
    "all but BatchNorm": lambda: freeze(Residual(affine=False), ""),
    "affine parameters too": Residual,
    "affine parameters alone": lambda: freeze(Residual(), "bn"),
    "one affine parameter": lambda: freeze(Residual(), "bn2.bias"),
    "SyncBatchNorm": lambda: Residual(sync=True),
    "a subclass with an activation": with_activation,
}


@pytest.mark.parametrize(
    ("make_partition", "norms"), [(per_layer, "bookkeeping"), (flat, "bookkeeping"), (flat, "ghost")]
)
@pytest.mark.parametrize("name", MODELS)
def test_in_eval_mode_it_is_exact(double, name, make_partition, norms):
    model, x = MODELS[name]().eval(), torch.randn(BATCH, 3, 5, 5)
    buffers, plain = copy.deepcopy(dict(model.named_buffers())), model(x)
    with attach(model, make_partition(model), 1.0, norms=norms) as engine:
        for rows in (range(BATCH), range(4), range(4, BATCH)):
            assert_exact(engine, lambda rows: model(x[list(rows)]).square().sum(1), rows)
    assert all(torch.equal(there, buffers[at]) for at, there in model.named_buffers())
    assert "forward" not in vars(model.bn1) and torch.equal(model(x), plain)


@pytest.mark.parametrize("affine", [True, False])
def test_in_training_mode_it_is_refused_with_what_to_do(affine):
    model = freeze(Residual(affine), "fc")
    with pytest.raises(UserError, match=r"'bn1' \(BatchNorm2d\) mixes the examples .* call .eval\(\) on it before"):
        per_layer(model)
    model.eval().bn2.train()
    with pytest.raises(UserError, match="'bn2'"):
        attach(model, flat(model), 1.0)


def test_without_running_statistics_it_is_always_refused():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, track_running_stats=False)).eval()
    with pytest.raises(UserError, match=r"'1' \(BatchNorm1d\) mixes the examples .* bounded: replace it"):
        per_layer(model)


@pytest.mark.parametrize(("trained", "compiled"), [("fc", False), ("bn", False), ("fc", True)])
def test_training_mode_later_is_refused_in_that_step(trained, compiled):
    model, x = freeze(Residual(), trained).eval(), torch.randn(BATCH, 3, 5, 5)
    with attach(model, flat(model), 1.0) as engine:
        run = torch.compile(model, backend="eager") if compiled else model
        losses_of = rows_of(lambda x: run(x).sum(1), x)
        engine.clip(losses_of, range(BATCH))
        trains = [p for p in model.parameters() if p.requires_grad]
        before = [p.grad.clone() for p in trains]
        model.train()
        for refused in (engine.clip, engine.trace):
            with pytest.raises(UserError, match=r"'bn1' \(BatchNorm2d\) mixes"):
                refused(losses_of, range(BATCH))
        assert all(torch.equal(p.grad, b) for p, b in zip(trains, before, strict=True))
        model.bn1.eval(), model.bn2.eval()
        engine.clip(losses_of, range(BATCH))  # dropout may train
        model.train()(x).sum().backward()  # nothing refuses it outside of the engine's passes


def test_shards_refuse_it_too():
    model, x = freeze(Residual(), "fc").eval(), torch.randn(BATCH, 3, 5, 5)
    with attach(model, per_layer(model), 1.0, direct=True) as engine:
        clip_batch(engine, lambda x: model(x).sum(1), x)
        model.train()
        with pytest.raises(UserError, match=r"'bn1' \(BatchNorm2d\) mixes"):
            clip_batch(engine, lambda x: model(x).sum(1), x)


@pytest.mark.parametrize("trained", ["fc", ""])
def test_private_steps_keep_eval_mode(trained):
    torch.manual_seed(0)
    model = freeze(Residual(), trained).eval()
    x, y = torch.randn(30, 3, 5, 5), torch.randint(0, 3, (30,))

    def losses(model: nn.Module, batch: list[Tensor]) -> Tensor:
        return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")

    private = make_private(
        model,
        torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1),
        TensorDataset(x, y),
        losses,
        noise_multiplier=1.0,
        steps=3,
        batch_size=10,
    )
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    for _ in private.steps():
        model.train()  # each step puts modules into the modes that they were in when `make_private` was called
    assert private.executed == 3
    assert all(torch.equal(buffer, buffers[name]) for name, buffer in model.named_buffers())


@pytest.mark.parametrize("make_partition", [flat, per_layer])
def test_a_frozen_layer_whose_channels_become_tokens_is_exact_for_one_example_at_a_time(double, make_partition):
    class Tokens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm, self.head = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Linear(8, 5)
            self.norm.running_var.uniform_(0.5, 2.0)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.norm(self.conv(x)).flatten(2).transpose(1, 2)).square().sum((1, 2))

    model, x = Tokens(), torch.randn(6, 3, 6, 6)
    model.norm.eval()
    losses_of = rows_of(model, x)
    with attach(model, make_partition(model), 1.0) as engine:
        engine.trace(losses_of, range(6))
        verify(engine, losses_of, range(6))
        for i in range(6):
            assert_exact(engine, losses_of, [i])
