"""Clipped sums are added to .grad, and no other gradient is."""

import pytest
import torch
from torch import Tensor, nn

from groupwise.clipping import attach, flat, per_layer
from groupwise.clipping.passes import ClippedGradients
from groupwise.errors import UserError
from tests.clipping.alone import assert_exact, assert_sums, gradients
from tests.clipping.conftest import LastOutput
from tests.clipping.traced import clip, clip_batch, trace_batch


def transposed_weight() -> nn.Linear:
    layer = nn.Linear(4, 6)
    layer.weight = nn.Parameter(torch.randn(4, 6).t())
    return layer


LAYERS = {
    "linear": (lambda: nn.Linear(4, 6), (5, 3, 4)),
    "transposed weight": (transposed_weight, (5, 3, 4)),
    "narrow linear": (lambda: nn.Linear(2, 600), (5, 3, 2)),
    "convolution": (lambda: nn.Conv2d(4, 6, 3), (5, 4, 6, 6)),
    "channels last": (lambda: nn.Conv2d(4, 6, 3).to(memory_format=torch.channels_last), (5, 4, 6, 6)),
    "transposed convolution": (lambda: nn.ConvTranspose2d(4, 6, 3), (5, 4, 3, 3)),
    "norm": (lambda: nn.LayerNorm(4), (5, 3, 4)),
}


@pytest.mark.parametrize("make_partition", [flat, per_layer])
@pytest.mark.parametrize("method", ["gram", "materialize"])
@pytest.mark.parametrize("name", LAYERS)
def test_gradients_have_their_parameters_strides(name, method, make_partition):
    """As autograd's gradients do; otherwise optimisers with foreach=True are slower."""
    make, shape = LAYERS[name]
    layer = make()
    with attach(layer, make_partition(layer), 1.0, formula=method) as engine:
        clip_batch(engine, lambda x: layer(x).flatten(1).square().sum(1), torch.randn(shape))
    for parameter in layer.parameters():
        assert parameter.grad is not None
        assert parameter.grad.stride() == parameter.stride()


def test_a_float64_sum_becomes_a_gradient_of_the_parameters_dtype():
    parameter, total = nn.Parameter(torch.zeros(4, 3)), torch.randn(4, 3).double()
    gradients = ClippedGradients({"weight": parameter})
    with gradients.collected():
        gradients.add(parameter, total)
    torch.testing.assert_close(parameter.grad, total.float())


@pytest.mark.parametrize("norms", ["bookkeeping", "ghost"])
@pytest.mark.parametrize("passes", range(4))
def test_use_of_a_parameter_outside_its_layer_is_refused_and_not_in_grad(passes, norms):
    """Only the first pass walks the graph; later the microbatch is clipped and counted, without the bypass."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    x = torch.randn(4, 3)

    def losses_of(rows) -> Tensor:
        return model(x[rows]).square().sum(1)

    with attach(model, flat(model), 1.0, norms=norms) as engine:
        engine.trace(losses_of, range(4))
        for _ in range(passes):
            clip(engine, losses_of, range(4))
        before = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
        penalty = model[0].weight.square().sum()  # computed outside of the losses it is not clipped
        with pytest.raises(UserError, match=r"'0.weight' is used outside .* weight_decay"):
            clip(engine, lambda rows: penalty + losses_of(rows) if passes % 2 else losses_of(rows) + penalty, range(4))
        assert engine.examples == 4 * (passes + (passes >= 1))
        for parameter, earlier in zip(model.parameters(), before, strict=True):
            if earlier is None:
                assert parameter.grad is None
            else:
                torch.testing.assert_close(parameter.grad, earlier * (passes + 1) / passes)
        model.zero_grad()
        clip(engine, losses_of, range(4))  # the engine still works
        for parameter, earlier in zip(model.parameters(), before, strict=True):
            if earlier is not None:
                torch.testing.assert_close(parameter.grad, earlier / passes)


def test_a_failed_backward_pass_leaves_grad_unchanged():
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    x = torch.randn(4, 3)

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, g):
            raise ZeroDivisionError

    with attach(model, per_layer(model), 1.0) as engine:
        clip_batch(engine, lambda x: model(x).sum(1), x)
        before = [p.grad.clone() for p in model.parameters()]
        with pytest.raises(ZeroDivisionError):
            clip_batch(engine, lambda x: model[1](Fails.apply(model[0](x))).sum(1), x)
        assert all(torch.equal(p.grad, e) for p, e in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize("make_model", [lambda: nn.Linear(3, 2), LastOutput, lambda: nn.LayerNorm(3)])
@pytest.mark.parametrize("make_partition", [flat, per_layer])
def test_create_graph_is_refused(make_model, make_partition):
    model, x = make_model(), torch.randn(4, 5, 3)
    with attach(model, make_partition(model), 1.0) as engine:
        trace_batch(engine, lambda x: model(x).flatten(1).sum(1), x)
        with engine.forward(4):
            losses = model(x).sum()
        with pytest.raises(UserError, match="create_graph"):
            losses.backward(create_graph=True)


@pytest.mark.parametrize("make_partition", [flat, per_layer])
def test_input_derivatives_are_refused_and_finite_differences_are_exact(make_partition, double):
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
