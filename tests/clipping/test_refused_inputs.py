"""Unsupported inputs and contexts are refused: float16 autocast, nested and sparse tensors, torch.func transforms."""

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from groupwise.clipping import WSConv2d, attach, flat, per_layer
from groupwise.clipping.products import attention
from groupwise.errors import UserError
from tests.clipping.conftest import Attention, LastOutput, Recurrent, Scale
from tests.clipping.traced import clip, clip_batch


class Shift(nn.Module):
    """A module with one parameter and no layer."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.shift


LAYERS = {
    "Linear": (lambda: nn.Linear(4, 3), (6, 4)),
    "Conv2d": (lambda: nn.Conv2d(3, 4, 3), (6, 3, 5, 5)),
    "WSConv2d": (lambda: WSConv2d(3, 4, 3), (6, 3, 5, 5)),
    "LayerNorm": (lambda: nn.LayerNorm(4), (6, 4)),
    "GroupNorm": (lambda: nn.GroupNorm(2, 4), (6, 4)),
    "RMSNorm": (lambda: nn.RMSNorm(4), (6, 4)),
    "LSTM": (LastOutput, (6, 2, 3)),
    "GRUCell": (Recurrent, (6, 2, 5)),
    "MultiheadAttention": (Attention, (6, 3, 8)),
    "a module without a rule": (lambda: Scale(4), (6, 4)),
    "a parameter": (Shift, (6, 4)),
}


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("name", [*LAYERS, "Embedding"])
def test_autocast_to_float16_is_refused(name, direct):
    if direct and name in ("LSTM", "GRUCell", "MultiheadAttention", "a module without a rule", "a parameter"):
        pytest.skip("not for direct=True")
    make, shape = LAYERS.get(name, (lambda: nn.Embedding(5, 4), None))
    model, x = make(), torch.randn(shape) if shape else torch.randint(0, 5, (6, 2))
    with attach(model, per_layer(model), 1.0, direct=direct) as engine:
        refused = pytest.raises(UserError, match=r"under autocast to float16, .* give torch.autocast torch.bfloat16")
        with refused, torch.autocast("cpu", torch.float16):
            clip_batch(engine, lambda x: model(x).float().square().flatten(1).sum(1), x)
        assert all(p.grad is None for p in model.parameters())
        with torch.autocast("cpu", torch.bfloat16):
            clip_batch(engine, lambda x: model(x).float().square().flatten(1).sum(1), x)


def test_frozen_layers_and_evaluation_may_run_in_float16():
    model = nn.Sequential(nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 2))

    def losses_of(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.float16):
            x = model[0](x)
        return model[1](x.float()).sum(1)

    with attach(model, flat(model), 1.0) as engine:
        clip_batch(engine, losses_of, torch.randn(6, 4))
        with torch.no_grad(), torch.autocast("cpu", torch.float16):
            assert model[1](torch.randn(6, 4)).dtype == torch.float16


@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
def test_a_nested_tensor_is_refused(layout):
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh())
    texts = [torch.randn(2, 3), torch.randn(4, 3)]

    def losses_of(rows):
        x = torch.nested.nested_tensor([texts[i] for i in rows], layout=layout)
        return torch.stack([y.square().sum() for y in model(x).unbind()])

    for rows in ([0, 1], [1]):
        refused = pytest.raises(UserError, match=r"Layer '0' got a nested tensor, .* pad them to the longest")
        with attach(model, flat(model), 1.0) as engine, refused:
            clip(engine, losses_of, rows)


@pytest.mark.parametrize("shape", [(5,), (3, 5)])
def test_a_norm_over_the_batch_axis_is_refused(shape):
    module = nn.RMSNorm(shape)
    with attach(module, flat(module), 1.0) as engine, pytest.raises(UserError, match="first axis must be the batch"):
        clip_batch(engine, lambda x: module(x).flatten(1).sum(1), torch.ones(shape))


@pytest.mark.parametrize("unbatched", [0, 1, 2])
def test_attention_without_a_batch_axis_is_refused(unbatched):
    inputs = [torch.ones(4, 3, 6)] * 3
    inputs[unbatched] = torch.ones(4, 6)
    with pytest.raises(UserError, match=r"MultiheadAttention got an input of shape .* the batch"):
        attention(*inputs)


class Transforms(nn.Module):
    """A layer and parameters, and a function that applies a `torch.func` transform to them in forward."""

    def __init__(self, transform):
        super().__init__()
        self.layer, self.transform = nn.Linear(4, 4), transform
        self.w, self.scale = nn.Parameter(torch.ones(3, 4)), nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        used = self.layer(x) * self.scale + (x @ self.w.T).sum(1, keepdim=True)
        return used + self.transform(self, x)


def tangent(model: nn.Module, x: Tensor) -> Tensor:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(model.layer(forward_ad.make_dual(x, x))).tangent


@pytest.mark.parametrize(
    "transform",
    [
        lambda model, x: torch.vmap(model.layer)(x),
        lambda model, x: torch.vmap(lambda row: model.scale * row)(x),
        lambda model, x: torch.vmap(lambda row: (model.w @ row).sum())(x).unsqueeze(1),
        lambda model, x: torch.func.grad(lambda z: model.layer(z).square().sum())(x),
        lambda model, x: torch.func.jacrev(lambda z: (z @ model.w.T).square().sum())(x),
        lambda model, x: torch.func.jvp(lambda z: (z @ model.w.T).sin(), (x,), (x,))[1],
        tangent,
    ],
)
@pytest.mark.parametrize("make_partition", [flat, per_layer])
def test_transforms_of_trainable_parameters_in_forward_are_refused(transform, make_partition):
    model, x = Transforms(transform), torch.randn(6, 4)
    with attach(model, make_partition(model), 1.0) as engine, pytest.raises((UserError, RuntimeError)):
        clip_batch(engine, lambda x: model(x).sum(1), x)
    allowed = Transforms(lambda model, x: torch.vmap(torch.sin)(model.layer(x)))
    with attach(allowed, make_partition(allowed), 1.0) as engine:
        clip_batch(engine, lambda x: allowed(x).sum(1), x)


@pytest.mark.parametrize("examples", [1, 5])
def test_a_sparse_tensor_is_refused(examples):
    model = nn.Linear(3, 4)
    refused = pytest.raises(UserError, match=r"got a sparse tensor, .* make it dense")
    with attach(model, flat(model), 1.0) as engine, refused:
        clip_batch(engine, lambda x: model(x.to_sparse()).to_dense().square().sum(1), torch.randn(examples, 3))
