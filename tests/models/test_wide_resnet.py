"""Wide residual networks: sizes, the three block orders, what may be given and what may not."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from groupwise.clipping import WSConv2d
from groupwise.errors import UserError
from groupwise.models import BLOCK_ORDERS, wide_resnet


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
    for _ in range(30):
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
