"""Each block against its source, written out once more as a formula."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from groupwise.clipping import WSConv2d
from groupwise.errors import UserError
from groupwise.models import BLOCK_ORDERS, wide_resnet
from groupwise.models.image_networks import ClassicBlock, PreactivationBlock, UnitVarianceConv, group_count, make_norm

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


def test_without_standardisation_a_convolution_is_plain():
    conv = UnitVarianceConv(8, 16, 2, weight_standardization=False)
    x = torch.randn(3, 8, 6, 6)
    assert type(conv.conv) is nn.Conv2d
    torch.testing.assert_close(conv(x), F.conv2d(x, conv.conv.weight, conv.conv.bias, 2, 1))


@pytest.mark.parametrize(
    ("channels", "norm_groups", "expected"),
    [
        (64, 16, 16),
        (256, 16, 16),
        (32, 16, 16),
        (16, 16, 8),
        (16, 64, 8),
        (8, 16, 4),
        (48, 20, 16),
        (7, 16, 1),
        (2, 2, 1),
    ],
)
def test_the_number_of_groups_is_as_asked_unless_channels_are_few(channels, norm_groups, expected):
    assert group_count(channels, norm_groups) == expected


@pytest.mark.parametrize("norm_groups", [1, 3, 16, 1000])
def test_groups_divide_the_channels_and_hold_at_least_two(norm_groups):
    for channels in range(2, 130):
        groups = group_count(channels, norm_groups)
        assert channels % groups == 0
        assert groups <= norm_groups
        assert channels // groups >= 2


def test_the_stem_keeps_the_published_groups_of_one_channel():
    assert group_count(16, 16, stem=True) == 16
    assert group_count(16, 8, stem=True) == 8


def test_groups_of_one_channel_would_leave_nothing_to_a_global_average():
    """Why the rule exists: mean(GroupNorm) is the bias where each channel is a group."""
    x = torch.randn(4, 32, 4, 4)
    erased = nn.GroupNorm(32, 32)(x).mean(dim=(2, 3))
    kept = make_norm("group", 32, 32)(x).mean(dim=(2, 3))
    assert erased.abs().max() < 1e-5
    assert kept.std() > 0.1


def test_the_batch_norm_of_the_baseline():
    assert isinstance(make_norm("batch", 32, 16), nn.BatchNorm2d)


def parameter_count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("block_order", "expected"), [("classic", 2_738_186), ("deepmind", 2_753_818), ("order3", 2_753_818)]
)
def test_wrn16_4_has_the_papers_2_8_million_parameters(block_order, expected):
    assert parameter_count(wide_resnet(block_order=block_order)) == expected


def test_wrn40_4_has_the_8_9_million_parameters_of_de_et_al():
    assert parameter_count(wide_resnet(depth=40)) == 8_961_306


@pytest.mark.parametrize("block_order", BLOCK_ORDERS)
@pytest.mark.parametrize(("size", "in_channels"), [((8, 8), 1), ((9, 11), 1), ((16, 16), 3), ((32, 32), 3)])
def test_any_image_size_and_channels(block_order, size, in_channels):
    model = wide_resnet(depth=10, width=1, num_classes=7, in_channels=in_channels, block_order=block_order)
    assert model(torch.randn(2, in_channels, *size)).shape == (2, 7)


@pytest.mark.parametrize("block_order", BLOCK_ORDERS)
def test_depth_is_six_layers_a_block_in_each_stage(block_order):
    for depth, blocks in ((10, 3), (16, 6), (22, 9)):
        assert len(wide_resnet(depth=depth, width=1, block_order=block_order).blocks) == blocks


@pytest.mark.parametrize("block_order", BLOCK_ORDERS)
@pytest.mark.parametrize(("norm", "mixes"), [("group", False), ("batch", True)])
def test_only_the_batch_norm_baseline_mixes_examples(block_order, norm, mixes):
    model = wide_resnet(depth=10, width=1, block_order=block_order, norm=norm).double().train()
    images = torch.randn(4, 3, 8, 8, dtype=torch.float64)
    together, alone = model(images), model(images[:2])
    assert torch.allclose(together[:2], alone, atol=1e-9) is not mixes
    assert any(isinstance(module, nn.BatchNorm2d) for module in model.modules()) is mixes


@pytest.mark.parametrize("block_order", BLOCK_ORDERS)
def test_weight_standardisation_is_in_every_convolution_or_in_none(block_order):
    for on in (True, False):
        model = wide_resnet(depth=10, width=1, block_order=block_order, weight_standardization=on)
        convolutions = [module for module in model.modules() if isinstance(module, nn.Conv2d)]
        assert len(convolutions) >= 7
        assert all(isinstance(module, WSConv2d) is on for module in convolutions)


def test_gain_and_bias_are_where_the_source_has_them():
    def has(model, attribute):
        return {getattr(module, attribute) is not None for module in model.modules() if isinstance(module, WSConv2d)}

    for block_order, gain in (("classic", False), ("deepmind", True), ("order3", True)):
        model = wide_resnet(depth=10, width=1, block_order=block_order)
        assert has(model, "gain") == {gain}
        assert has(model, "bias") == {True}


def test_order3_is_deepmind_but_for_the_shortcuts():
    deepmind, order3 = (wide_resnet(depth=16, width=1, block_order=order) for order in ("deepmind", "order3"))
    order3.load_state_dict(deepmind.state_dict())
    x = torch.randn(2, 16, 8, 8)
    assert not torch.allclose(deepmind.blocks[0](x), order3.blocks[0](x))  # the first block of a stage projects
    torch.testing.assert_close(deepmind.blocks[1](x), order3.blocks[1](x))


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


@pytest.mark.parametrize("block_order", BLOCK_ORDERS)
def test_a_seed_fixes_the_weights(block_order):
    def weights(seed):
        torch.manual_seed(seed)
        return torch.cat([p.flatten() for p in wide_resnet(depth=10, width=1, block_order=block_order).parameters()])

    assert torch.equal(weights(1), weights(1))
    assert not torch.equal(weights(1), weights(2))


@pytest.fixture
def one_thread():
    """Small tensors gain nothing from threads, and lose much where the machine is busy."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("block_order", BLOCK_ORDERS)
def test_it_learns(block_order):
    torch.manual_seed(0)
    model = wide_resnet(depth=10, width=1, num_classes=4, in_channels=1, block_order=block_order)
    labels = torch.arange(32) % 4
    images = 0.5 * torch.randn(32, 1, 8, 8)
    for quarter in range(4):  # each class is bright in a quarter of its own
        row, column = 4 * (quarter // 2), 4 * (quarter % 2)
        images[labels == quarter, :, row : row + 4, column : column + 4] += 2
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    for _ in range(12):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.3 * losses[0]


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
