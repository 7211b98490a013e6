"""Blocks of the wide ResNet match formulas of the papers, and the network has the published size."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from groupwise.errors import UserError
from groupwise.models.image_networks import PreactivationBlock, WideResNet

OPTIONS = {"norm_groups": 4, "weight_standardization": True}


def perturbed(module: nn.Module) -> nn.Module:
    """The module in float64, with every parameter perturbed from its initial value."""
    module = module.double()
    for parameter in module.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return module


def norm(x, layer):
    return F.group_norm(x, 4, layer.weight, layer.bias)


def de_et_al_conv(x, conv):
    """(w - mean)·gain/√(fan_in·variance), plus a bias."""
    fan_in = conv.weight[0].numel()
    mean = conv.weight.mean(dim=(1, 2, 3), keepdim=True)
    variance = conv.weight.var(dim=(1, 2, 3), keepdim=True, unbiased=False)
    weight = (conv.weight - mean) / (fan_in * variance).sqrt() * conv.gain.view(-1, 1, 1, 1)
    return F.conv2d(x, weight, conv.bias, conv.stride, conv.padding)


@pytest.mark.parametrize(("stride", "project"), [(1, True), (2, True), (1, False)])
def test_preactivation_block_matches_its_formula(stride, project):
    out_channels = 16 if project else 8
    block = perturbed(PreactivationBlock(8, out_channels, stride, project=project, stem=False, **OPTIONS))
    x = torch.randn(3, 8, 9, 9, dtype=torch.float64)

    hidden = de_et_al_conv(norm(x.relu(), block.norm1), block.conv1)
    residual = de_et_al_conv(norm(hidden.relu(), block.norm2), block.conv2)
    shortcut = x if not project else de_et_al_conv(norm(x.relu(), block.shortcut_norm), block.shortcut_conv)
    torch.testing.assert_close(block(x), shortcut + residual, rtol=1e-9, atol=1e-9)


def test_wrn16_4_has_2_8_million_parameters():
    assert sum(parameter.numel() for parameter in WideResNet().parameters()) == 2_753_818


@pytest.mark.parametrize(("size", "in_channels"), [((8, 8), 1), ((9, 11), 1), ((16, 16), 3), ((32, 32), 3)])
def test_any_image_size_and_channels_are_accepted(size, in_channels):
    model = WideResNet(depth=10, width=1, num_classes=7, in_channels=in_channels)
    assert model(torch.randn(2, in_channels, *size)).shape == (2, 7)


def test_wrn16_4_normalises_in_16_groups_everywhere():
    norms = [module for module in WideResNet().modules() if isinstance(module, nn.GroupNorm)]
    assert {module.num_groups for module in norms} == {16}
    assert len(norms) == 16


def test_too_many_norm_groups_keep_the_image():
    torch.manual_seed(0)
    model = WideResNet(depth=10, width=1, norm_groups=1024)
    assert model(torch.randn(8, 3, 16, 16)).std(dim=0).min() > 1e-3


@pytest.mark.parametrize("depth", [17, 4])
def test_bad_depth_gives_one_sentence(depth):
    with pytest.raises(UserError, match=f"depth={depth}") as caught:
        WideResNet(depth=depth)
    assert "\n" not in str(caught.value)
