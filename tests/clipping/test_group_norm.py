"""GroupNorm in both memory layouts: the same numbers as a loop over single examples."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn

from groupwise.clipping import attach, flat, per_layer
from groupwise.clipping.rules import group_norm
from tests.clipping.traced import clip_batch, trace_batch


@pytest.fixture(params=[None, 6])
def grid(monkeypatch, request) -> None:
    """Where a GPU's grid takes six groups, three calls make the batch."""
    if request.param is not None:
        monkeypatch.setattr(group_norm, "LARGEST_GRID", request.param)


def single(model: nn.Module, x: Tensor) -> list[list[Tensor]]:
    """Gradients of single examples."""
    rows = [x[i : i + 1].contiguous() for i in range(len(x))]
    return [list(torch.autograd.grad(loss(model, row).sum(), trained(model))) for row in rows]


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).flatten(1).pow(3).sum(1)


MODELS = {
    "group": lambda: nn.Sequential(nn.Conv2d(3, 6, 3, dtype=torch.float64), nn.GroupNorm(2, 6, dtype=torch.float64)),
    "instance": lambda: nn.Sequential(nn.InstanceNorm2d(3, affine=True, dtype=torch.float64)),
    "frozen bias": lambda: nn.Sequential(nn.GroupNorm(3, 3, dtype=torch.float64)),
}


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("groups", [flat, per_layer])
def test_equal_to_single_examples(grid, name, layout, groups) -> None:
    torch.manual_seed(0)
    model = MODELS[name]()
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    if name == "frozen bias":
        model[0].bias.requires_grad_(False)
    x = (torch.randn(5, 3, 7, 7, dtype=torch.float64) + 3).to(memory_format=layout)
    expected = single(model, x)
    engine = attach(model, groups(model), 0.7)
    clip_batch(engine, partial(loss, model), x)
    for group, norms in zip(engine.groups, engine.per_example_norms, strict=True):
        places = [i for i, p in enumerate(trained(model)) if any(p is q for q in group.parameters)]
        true = torch.stack([sum(g[i].square().sum() for i in places).sqrt() for g in expected])
        assert torch.allclose(norms, true, rtol=1e-9)
        for i in places:
            total = sum(g[i] * min(1.0, 0.7 / float(n)) for g, n in zip(expected, true, strict=True))
            assert torch.allclose(trained(model)[i].grad, total, rtol=1e-8, atol=1e-11)


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
    rule = group_norm.GroupNormRule(norm)
    with torch.no_grad():
        _, saved = rule.forward(x, norm.weight, norm.bias)
        found = rule.input_gradient(saved, rule.arrange(saved, 2 * again))
    assert found is not None
    assert found.is_contiguous(memory_format=layout)
    assert torch.allclose(found, expected, atol=2e-4)


def test_half_precision_is_measured_in_float32() -> None:
    torch.manual_seed(0)
    norm = nn.GroupNorm(2, 6, dtype=torch.bfloat16)
    rule, x = group_norm.GroupNormRule(norm), torch.randn(5, 6, 4, 4, dtype=torch.bfloat16)
    with torch.no_grad():
        y, saved = rule.forward(x, norm.weight, norm.bias)
        gx, saved = rule.begin_backward(saved, y, True)
        rows = rule.per_example_gradients(saved, y, (True, True))
    assert gx is not None and gx.dtype == torch.bfloat16
    assert [row.dtype for row in rows if row is not None] == [torch.float32] * 2


def test_one_example_whose_tokens_became_an_image():
    """Its strides are those of channels_last but for the axis of length 1, on which torch's kernel insists."""

    class Image(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.transpose(1, 2).reshape(len(x), 4, 3, 3)

    model = nn.Sequential(nn.Linear(4, 4), Image(), nn.GroupNorm(2, 4)).double()
    x = torch.randn(1, 9, 4, dtype=torch.float64)
    assert not group_norm._stays_channels_last(model[:2](x)) and not model[:2](x).is_contiguous()
    (expected,) = single(model, x)
    engine = attach(model, flat(model), 1e9)
    clip_batch(engine, partial(loss, model), x)
    for parameter, gradient in zip(trained(model), expected, strict=True):
        assert torch.allclose(parameter.grad, gradient, rtol=1e-8, atol=1e-11)
