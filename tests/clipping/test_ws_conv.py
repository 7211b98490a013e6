"""Weight-standardised convolutions: their output, and their norms for every gain, precision and method."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from groupwise.clipping import WSConv2d, attach, explain, flat, per_layer
from groupwise.clipping.rules.computed_weight import WSConv2dRule, standardize_weight
from tests.clipping.alone import assert_exact
from tests.clipping.traced import clip_batch, trace_batch


def test_each_filter_has_mean_zero_and_norm_one():
    weight = torch.randn(4, 3, 2, 5, dtype=torch.float64) + 2
    standard, scale, _ = standardize_weight(weight)
    assert standard.shape == weight.shape and scale.shape == (4, 1, 1, 1)
    assert standard.mean((1, 2, 3)).abs().max() < 1e-12
    torch.testing.assert_close(standard.square().sum((1, 2, 3)), torch.ones(4, dtype=torch.float64))
    torch.testing.assert_close((weight - weight.mean((1, 2, 3), keepdim=True)) * scale, standard)


def test_the_scale_of_a_nearly_constant_filter_is_limited():
    weight = torch.full((1, 1, 1, 2), 0.5)
    weight[0, 0, 0, 0] += 2e-3
    standard, scale, _ = standardize_weight(weight)
    assert scale.item() == pytest.approx(100.0)
    assert standard.flatten().tolist() == pytest.approx([0.1, -0.1], rel=1e-3)


@pytest.mark.parametrize("gain", [False, True])
def test_output_is_a_convolution_with_standardised_filters(gain):
    layer = WSConv2d(4, 6, 3, stride=2, padding=1, groups=2, gain=gain)
    assert [name for name, _ in layer.named_parameters()] == ["weight", "bias"] + ["gain"] * gain
    x, weight = torch.randn(2, 4, 7, 7), standardize_weight(layer.weight)[0]
    if gain:
        assert layer.gain.tolist() == [1.0] * 6
        torch.nn.init.uniform_(layer.gain, 0.5, 2.0)
        weight = weight * layer.gain[:, None, None, None]
    torch.testing.assert_close(layer(x), F.conv2d(x, weight, layer.bias, 2, 1, 1, 2))


def test_other_padding_modes_are_refused():
    with pytest.raises(ValueError, match="padding_mode='circular'"):
        WSConv2d(3, 4, 3, padding=1, padding_mode="circular")
    assert WSConv2d(3, 4, 3).gain is None


@pytest.mark.parametrize("norms", ["bookkeeping", "ghost"])
@pytest.mark.parametrize("gain", [None, 0.0, 1e-30, -2.0])
def test_gram_norms_are_exact_for_every_gain(gain, norms, double, monkeypatch):
    layer = WSConv2d(3, 4, 3, padding=1, gain=gain is not None)
    with torch.no_grad():
        if layer.gain is not None:
            layer.gain[1] = gain
        layer.bias.normal_()
    x = torch.randn(4, 3, 5, 5)
    partition = (per_layer if norms == "bookkeeping" else flat)(layer)
    monkeypatch.setattr(WSConv2dRule, "gradient_chunks", lambda *_: pytest.fail("gradients are formed"))
    with attach(layer, partition, 1.0, formula="gram", norms=norms) as engine:
        assert_exact(engine, lambda rows: layer(x[list(rows)]).flatten(1).square().sum(1), range(4))
        assert "gram" in explain(engine)


def aligned(layer: WSConv2d) -> tuple[Tensor, Tensor]:
    """Inputs (p, c, 3, 3) close to the filters, and output gradients: G is a multiple of ŵ up to 1 %."""
    weight = layer.weight.detach()
    standard = weight - weight.mean((1, 2, 3), keepdim=True)
    standard = standard / standard.flatten(1).norm(dim=1).view(-1, 1, 1, 1)
    count = len(weight)
    x = standard + 1e-2 * torch.randn_like(standard) / math.sqrt(standard[0].numel())
    return 10 * torch.rand(count, 1, 1, 1) * x, torch.eye(count).view(count, count, 1, 1) * torch.rand(count, 1, 1, 1)


def largest_sum(layer: WSConv2d, x: Tensor, directions: Tensor, dtype: torch.dtype, **options: str) -> float:
    """The largest norm of a clipped gradient of one example, in units of the threshold."""
    largest = 0.0
    for row, direction in zip(x, directions, strict=True):
        layer.zero_grad()
        with attach(layer, flat(layer), 1e-6, **options) as engine:
            with torch.autocast("cpu", dtype, enabled=dtype != torch.float32), engine.forward(1):
                y = layer(row.unsqueeze(0))
            engine.backward((y.float() * direction).flatten(1).sum(1))
        squares = sum(float(p.grad.double().square().sum()) for p in layer.parameters() if p.grad is not None)
        largest = max(largest, squares**0.5 / 1e-6)
    return largest


@pytest.mark.parametrize("norms", ["bookkeeping", "ghost"])
@pytest.mark.parametrize("formula", ["gram", "materialize"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("gain", [False, True])
def test_a_clipped_gradient_stays_below_its_threshold_in_low_precision(gain, dtype, formula, norms):
    """Standardisation removes nearly all of G; with ⟨G, ŵ⟩ from a bfloat16 output, sums had 10⁵ times the threshold."""
    torch.manual_seed(0)
    layer = WSConv2d(32, 16, 3, gain=gain, bias=False)
    if layer.gain is not None:
        layer.gain.requires_grad_(False)
    assert 0.8 < largest_sum(layer, *aligned(layer), dtype, formula=formula, norms=norms) < 1 + 1e-6


@pytest.mark.parametrize("gain", [False, True])
def test_autocast_rounds_filters_after_standardisation(gain):
    torch.manual_seed(0)
    layer, x = WSConv2d(3, 40, 3, padding="same", gain=gain), torch.randn(2, 3, 5, 5)
    with torch.no_grad():
        layer.weight.add_(1)  # in bfloat16 the weight itself would lose its deviations
    with torch.autocast("cpu", torch.bfloat16):
        expected = layer(x)
        torch.autograd.backward(expected.float().square().sum())
        gradients = [p.grad.clone() for p in layer.parameters()]
        layer.zero_grad()
        with attach(layer, per_layer(layer), 1e9) as engine:
            trace_batch(engine, lambda x: layer(x).float().flatten(1).square().sum(1), x)
            with engine.forward(2):
                y = layer(x)
            assert y.dtype == torch.bfloat16
            assert torch.equal(y, expected)
            engine.backward(y.float().flatten(1).square().sum(1))
    for parameter, gradient in zip(layer.parameters(), gradients, strict=True):
        assert parameter.grad.dtype == torch.float32
        error = (parameter.grad - gradient).norm() / gradient.norm()
        assert error < 0.02, error


@pytest.mark.parametrize("formula", ["gram", "materialize"])
@pytest.mark.parametrize("gain", [False, True])
def test_an_example_whose_sums_overflow_is_left_out_or_clipped(gain, formula):
    """What is subtracted from the norm is float32 and overflows before the norm itself, which is float64."""
    torch.manual_seed(0)
    model = nn.Sequential(WSConv2d(64, 64, 3, padding=1, bias=False, gain=gain))
    with torch.no_grad():
        model[0].weight.mul_(30)
    x = torch.rand(4, 64, 4, 4) * 0.1 + 1
    left_out = []
    with attach(model, per_layer(model), 1.0, formula=formula) as engine:
        for big in torch.logspace(15, 38, 47).tolist():
            model.zero_grad()
            engine.reset()
            scales = torch.tensor([big, 1, 1, 1]).view(-1, 1)
            clip_batch(engine, lambda x, w: (model(x).flatten(1) * w).sum(1), x, scales)
            total = torch.cat([p.grad.flatten() for p in model.parameters()]).double().norm()
            assert float(total) <= (4 - engine.nonfinite) * (1 + 1e-6)
            left_out.append(engine.nonfinite)
    assert left_out[0] == 0 and left_out[-1] == 1 and left_out == sorted(left_out)
