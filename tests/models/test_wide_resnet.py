"""Each block against its source, written out once more as a formula."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from groupwise.errors import UserError
from groupwise.models import BLOCK_ORDERS, wide_resnet
from groupwise.models.image_networks import ClassicBlock, PreactivationBlock, UnitVarianceConv

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
            8, out_channels, stride, project=project, norm_first_shortcut=norm_first_shortcut, stem=False, **OPTIONS
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


def parameter_count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("block_order", "expected"), [("classic", 2_738_186), ("deepmind", 2_753_818), ("order3", 2_753_818)]
)
def test_wrn16_4_has_the_papers_2_8_million_parameters(block_order, expected):
    assert parameter_count(wide_resnet(block_order=block_order)) == expected


@pytest.mark.parametrize("block_order", BLOCK_ORDERS)
@pytest.mark.parametrize(("size", "in_channels"), [((8, 8), 1), ((9, 11), 1), ((16, 16), 3), ((32, 32), 3)])
def test_any_image_size_and_channels(block_order, size, in_channels):
    model = wide_resnet(depth=10, width=1, num_classes=7, in_channels=in_channels, block_order=block_order)
    assert model(torch.randn(2, in_channels, *size)).shape == (2, 7)


@pytest.mark.parametrize("block_order", BLOCK_ORDERS)
@pytest.mark.parametrize(("norm", "mixes"), [("group", False), ("batch", True)])
def test_only_the_batch_norm_baseline_mixes_examples(block_order, norm, mixes):
    model = wide_resnet(depth=10, width=1, block_order=block_order, norm=norm).double().train()
    images = torch.randn(4, 3, 8, 8, dtype=torch.float64)
    together, alone = model(images), model(images[:2])
    assert torch.allclose(together[:2], alone, atol=1e-9) is not mixes
    assert any(isinstance(module, nn.BatchNorm2d) for module in model.modules()) is mixes


def test_wrn16_4_normalises_in_16_groups_everywhere():
    for block_order in BLOCK_ORDERS:
        norms = [
            module for module in wide_resnet(block_order=block_order).modules() if isinstance(module, nn.GroupNorm)
        ]
        assert {module.num_groups for module in norms} == {16}
        assert len(norms) == {"classic": 15, "deepmind": 16, "order3": 16}[block_order]


@pytest.mark.parametrize("block_order", BLOCK_ORDERS)
def test_too_many_groups_do_not_erase_the_image(block_order):
    torch.manual_seed(0)
    model = wide_resnet(depth=10, width=1, block_order=block_order, norm_groups=1024)
    assert model(torch.randn(8, 3, 16, 16)).std(dim=0).min() > 1e-3


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"depth": 17}, "depth=17"),
        ({"depth": 4}, "depth=4"),
        ({"width": 0}, "width=0"),
        ({"num_classes": 0}, "num_classes=0"),
        ({"in_channels": -1}, "in_channels=-1"),
        ({"norm_groups": 0}, "norm_groups=0"),
        ({"block_order": "order4"}, "classic, deepmind, order3"),
        ({"norm": "layer"}, "group, batch"),
    ],
)
def test_bad_arguments_are_told_in_one_sentence(arguments, words):
    with pytest.raises(UserError, match=words) as caught:
        wide_resnet(**arguments)
    assert "\n" not in str(caught.value)
