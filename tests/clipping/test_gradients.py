"""How clipped sums reach .grad, and that no other gradient does."""

import pytest
import torch
from torch import Tensor, nn

from groupwise.clipping import attach, flat, per_layer
from groupwise.clipping.passes import ClippedGradients
from groupwise.errors import UserError
from tests.clipping.traced import clip, clip_batch


def filters_last() -> nn.Conv2d:
    return nn.Conv2d(4, 6, 3).to(memory_format=torch.channels_last)


def turned_weight() -> nn.Linear:
    layer = nn.Linear(4, 6)
    layer.weight = nn.Parameter(torch.randn(4, 6).t())
    return layer


LAYERS = {
    "linear": (lambda: nn.Linear(4, 6), (5, 3, 4)),
    "turned weight": (turned_weight, (5, 3, 4)),
    "thin linear": (lambda: nn.Linear(2, 600), (5, 3, 2)),
    "convolution": (lambda: nn.Conv2d(4, 6, 3), (5, 4, 6, 6)),
    "channels last": (filters_last, (5, 4, 6, 6)),
    "transposed": (lambda: nn.ConvTranspose2d(4, 6, 3), (5, 4, 3, 3)),
    "norm": (lambda: nn.LayerNorm(4), (5, 3, 4)),
}


@pytest.mark.parametrize("make_partition", [flat, per_layer])
@pytest.mark.parametrize("method", ["gram", "materialize"])
@pytest.mark.parametrize("name", LAYERS)
def test_gradients_have_their_parameters_strides(name, method, make_partition):
    """As autograd's have: optimisers with foreach=True are slower otherwise."""
    make, shape = LAYERS[name]
    layer = make()
    with attach(layer, make_partition(layer), 1.0, formula=method) as engine:
        clip_batch(engine, lambda x: layer(x).flatten(1).square().sum(1), torch.randn(shape))
    for parameter in layer.parameters():
        assert parameter.grad is not None
        assert parameter.grad.stride() == parameter.stride()


def test_a_wider_sum_becomes_a_gradient_of_the_parameters_own_precision():
    parameter, total = nn.Parameter(torch.zeros(4, 3)), torch.randn(4, 3).double()
    gradients = ClippedGradients({"weight": parameter})
    with gradients.collected():
        gradients.add(parameter, total)
    torch.testing.assert_close(parameter.grad, total.float())


@pytest.mark.parametrize("norms", ["bookkeeping", "ghost"])
@pytest.mark.parametrize("passes", range(4))
def test_a_bypass_is_refused_in_any_backward_pass_and_is_not_in_grad(passes, norms):
    """The graph is walked in the first one only; later the microbatch is clipped and counted, without its bypass."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    x = torch.randn(4, 3)

    def losses_of(rows) -> Tensor:
        return model(x[rows]).square().sum(1)

    with attach(model, flat(model), 1.0, norms=norms) as engine:
        engine.trace(losses_of, range(4))
        for _ in range(passes):
            clip(engine, losses_of, range(4))
        before = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
        penalty = model[0].weight.square().sum()  # inside of the losses it would be clipped
        with pytest.raises(UserError, match=r"'0.weight' is used outside .* weight_decay"):
            clip(engine, lambda rows: penalty + losses_of(rows) if passes % 2 else losses_of(rows) + penalty, range(4))
        assert engine.examples == 4 * (passes + (passes >= 1))
        for parameter, earlier in zip(model.parameters(), before, strict=True):
            if earlier is None:
                assert parameter.grad is None
            else:
                torch.testing.assert_close(parameter.grad, earlier * (passes + 1) / passes)
        model.zero_grad()
        clip(engine, losses_of, range(4))  # it goes on
        for parameter, earlier in zip(model.parameters(), before, strict=True):
            if earlier is not None:
                torch.testing.assert_close(parameter.grad, earlier / passes)


def test_a_backward_pass_that_fails_leaves_grad_as_it_was():
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
