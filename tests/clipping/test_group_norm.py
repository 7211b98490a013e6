"""GroupNorm in both memory layouts: the same numbers as a loop over single examples."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn

from groupwise.clipping import attach, flat, per_layer
from groupwise.clipping.rules import normalization
from tests.clipping.alone import assert_exact, looped
from tests.clipping.traced import trace_batch


@pytest.fixture(params=[None, 6])
def grid(monkeypatch, request) -> None:
    """A GPU's grid takes six groups, fewer than those of the batch."""
    if request.param is not None:
        monkeypatch.setattr(normalization, "LARGEST_GRID", request.param)


def loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).flatten(1).pow(3).sum(1)


MODELS = {
    "group": lambda: nn.Sequential(nn.Conv2d(3, 6, 3), nn.GroupNorm(2, 6)),
    "instance": lambda: nn.InstanceNorm2d(3, affine=True),
    "frozen bias": lambda: nn.GroupNorm(3, 3),
    "of vectors": lambda: nn.Sequential(nn.Flatten(), nn.GroupNorm(7, 147)),
}


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("groups", [flat, per_layer])
def test_equal_to_single_examples(double, grid, name, layout, groups) -> None:
    model = MODELS[name]()
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    if name == "frozen bias":
        model.bias.requires_grad_(False)
    x = (torch.randn(5, 3, 7, 7) + 3).to(memory_format=layout)
    alone = looped(model, lambda i: loss(model, x[[i]].contiguous())[0], range(5))  # torch's own wants it so
    with attach(model, groups(model), 1.0) as engine:
        assert_exact(engine, lambda rows: loss(model, x[list(rows)]), range(5), loop=alone)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_outputs_and_input_gradients_keep_the_layout(grid, layout) -> None:
    torch.manual_seed(0)
    norm = nn.GroupNorm(2, 6)
    nn.init.normal_(norm.weight)
    model = nn.Sequential(norm)
    x = (torch.randn(5, 6, 4, 4) + 2).to(memory_format=layout).requires_grad_()
    y = norm(x)
    (expected,) = torch.autograd.grad(y.square().sum(), x)
    engine = attach(model, flat(model), 1.0)
    trace_batch(engine, partial(loss, model), x)
    with engine.forward(5):
        again = model(x)
    assert again.is_contiguous(memory_format=layout)
    assert torch.allclose(again, y, atol=1e-5)
    rule = normalization.GroupNormRule(norm)
    with torch.no_grad():
        _, saved = rule.forward(x, norm.weight, norm.bias)
        found = rule.input_gradient(saved, rule.arrange(saved, 2 * again))
    assert found is not None
    assert found.is_contiguous(memory_format=layout)
    assert torch.allclose(found, expected, atol=2e-4)


def test_one_example_whose_tokens_became_an_image(double):
    """Its strides are those of channels_last but for the axis of length 1, on which torch's kernel insists."""

    class Image(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.transpose(1, 2).reshape(len(x), 4, 3, 3)

    model, x = nn.Sequential(nn.Linear(4, 4), Image(), nn.GroupNorm(2, 4)), torch.randn(1, 9, 4)
    assert not normalization._stays_channels_last(model[:2](x)) and not model[:2](x).is_contiguous()
    with attach(model, flat(model), 1.0) as engine:
        assert_exact(engine, lambda rows: loss(model, x[list(rows)]), [0])
