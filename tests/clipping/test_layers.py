"""The weight-standardised convolution is what its docstring says."""

import pytest
import torch
import torch.nn.functional as F

from groupwise.clipping import WSConv2d
from groupwise.clipping.rules.computed_weight import standardize_weight


def test_each_filter_has_mean_zero_and_norm_one():
    weight = torch.randn(4, 3, 2, 5, dtype=torch.float64) + 2
    standard, scale = standardize_weight(weight)
    assert standard.shape == weight.shape and scale.shape == (4, 1, 1, 1)
    assert standard.mean((1, 2, 3)).abs().max() < 1e-12
    torch.testing.assert_close(standard.square().sum((1, 2, 3)), torch.ones(4, dtype=torch.float64))
    torch.testing.assert_close((weight - weight.mean((1, 2, 3), keepdim=True)) * scale, standard)


def test_a_flat_filter_is_divided_by_a_hundredth():
    weight = torch.full((1, 1, 1, 2), 0.5)
    weight[0, 0, 0, 0] += 2e-3
    standard, scale = standardize_weight(weight)
    assert scale.item() == pytest.approx(100.0)
    assert standard.flatten().tolist() == pytest.approx([0.1, -0.1], rel=1e-3)


@pytest.mark.parametrize("gain", [False, True])
def test_it_convolves_with_the_standardised_filters(gain):
    layer = WSConv2d(4, 6, 3, stride=2, padding=1, groups=2, gain=gain)
    assert [name for name, _ in layer.named_parameters()] == ["weight", "bias"] + ["gain"] * gain
    x, weight = torch.randn(2, 4, 7, 7), standardize_weight(layer.weight)[0]
    if gain:
        assert layer.gain.tolist() == [1.0] * 6
        torch.nn.init.uniform_(layer.gain, 0.5, 2.0)
        weight = weight * layer.gain[:, None, None, None]
    torch.testing.assert_close(layer(x), F.conv2d(x, weight, layer.bias, 2, 1, 1, 2))


def test_other_paddings_are_refused():
    with pytest.raises(ValueError, match="padding_mode='circular'"):
        WSConv2d(3, 4, 3, padding=1, padding_mode="circular")
    assert WSConv2d(3, 4, 3).gain is None
