"""Each block against its source, written out once more as a formula."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from groupwise.models.wide_resnet import ClassicBlock, PreactivationBlock, UnitVarianceConv

OPTIONS = {"norm": "group", "norm_groups": 4, "weight_standardization": True}


def perturbed(module: nn.Module) -> nn.Module:
    """In float64, with every gain, bias and affine parameter away from where it starts."""
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


def yu_conv(x, conv):
    """(w - mean)/√(variance + 1e-10), plus a bias."""
    variance, mean = torch.var_mean(conv.weight, dim=(1, 2, 3), keepdim=True, unbiased=False)
    weight = (conv.weight - mean) / (variance + 1e-10).sqrt()
    return F.conv2d(x, weight, conv.bias, conv.stride, conv.padding)


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("project", [True, False])
@pytest.mark.parametrize("norm_first_shortcut", [True, False], ids=["order3", "deepmind"])
def test_preactivation_block(stride, project, norm_first_shortcut):
    if not project and stride == 2:
        stride = 1
    out_channels = 16 if project else 8
    block = perturbed(
        PreactivationBlock(
            8,
            out_channels,
            stride,
            project=project,
            norm_first_shortcut=norm_first_shortcut,
            stem=False,
            **OPTIONS,
        )
    )
    x = torch.randn(3, 8, 9, 9, dtype=torch.float64)

    hidden = de_et_al_conv(norm(x.relu(), block.norm1), block.conv1)
    residual = de_et_al_conv(norm(hidden.relu(), block.norm2), block.conv2)
    if not project:
        shortcut = x
    elif norm_first_shortcut:
        shortcut = de_et_al_conv(norm(x, block.shortcut_norm).relu(), block.shortcut_conv)
    else:
        shortcut = de_et_al_conv(norm(x.relu(), block.shortcut_norm), block.shortcut_conv)
    torch.testing.assert_close(block(x), shortcut + residual, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("stride", [1, 2])
def test_classic_block(stride):
    block = perturbed(ClassicBlock(8, 8 * stride, stride, **OPTIONS))
    x = torch.randn(3, 8, 9, 9, dtype=torch.float64)

    hidden = norm(yu_conv(x, block.conv1.conv), block.norm1).relu()
    residual = norm(yu_conv(hidden, block.conv2.conv), block.norm2)
    shortcut = x
    if stride == 2:
        sampled = norm(x[:, :, ::2, ::2], block.shortcut_norm)
        shortcut = torch.cat((sampled, torch.zeros_like(sampled)), dim=1)
    torch.testing.assert_close(block(x), (shortcut + residual).relu(), rtol=1e-8, atol=1e-8)


def test_unit_variance_convolution_has_its_sources_gradients_too():
    """The scale of the input is there for the gradients that are clipped: of the weight and of the bias."""
    conv = UnitVarianceConv(8, 16, 1, weight_standardization=True).double()
    x = torch.randn(3, 8, 6, 6, dtype=torch.float64)
    upstream = torch.randn(3, 16, 6, 6, dtype=torch.float64)
    parameters = [conv.conv.weight, conv.conv.bias]

    def gradients(output):
        normalised = F.group_norm(output, 4)
        return torch.autograd.grad((normalised * upstream).sum(), parameters)

    for ours, source in zip(gradients(conv(x)), gradients(yu_conv(x, conv.conv)), strict=True):
        torch.testing.assert_close(ours, source, rtol=1e-6, atol=1e-8)


def test_without_standardisation_a_convolution_is_plain():
    conv = UnitVarianceConv(8, 16, 2, weight_standardization=False)
    x = torch.randn(3, 8, 6, 6)
    assert type(conv.conv) is nn.Conv2d
    torch.testing.assert_close(conv(x), F.conv2d(x, conv.conv.weight, conv.conv.bias, 2, 1))
