"""A GroupNorm never has one channel a group, but for the published stem."""

import pytest
import torch
from torch import nn

from groupwise.models.wide_resnet import group_count, make_norm


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
