"""Partitions: every trainable parameter in exactly one group, or an error that names it."""

import pytest
from torch import nn

from groupwise.clipping import Group, attach, by_mapping, flat, per_block, per_layer
from groupwise.errors import UserError


def residual_like() -> nn.Module:
    model = nn.Module()
    model.stem = nn.Conv2d(3, 4, 3)
    model.blocks = nn.Sequential(*(nn.Sequential(nn.GroupNorm(2, 4), nn.Conv2d(4, 4, 3)) for _ in range(3)))
    model.head = nn.Linear(4, 2)
    return model


def names(partition) -> list[str]:
    return [group.name for group in partition]


def test_flat_is_one_group_of_all_layers():
    (group,) = flat(residual_like())
    assert len(group.layers) == 8


def test_per_layer_has_a_group_a_layer_in_model_order():
    partition = per_layer(residual_like())
    assert names(partition)[0] == "stem" and names(partition)[-1] == "head"
    assert all(len(group.layers) == 1 for group in partition) and len(partition) == 8


def test_per_block_groups_residual_blocks_and_leaves_the_rest_alone():
    partition = per_block(residual_like())
    assert names(partition) == ["stem", "blocks.0", "blocks.1", "blocks.2", "head"]
    assert partition[1].layers == ("blocks.0.0", "blocks.0.1")


def test_frozen_layers_are_in_no_group():
    model = residual_like()
    model.stem.requires_grad_(False)
    assert "stem" not in names(per_layer(model))


def test_layers_that_share_a_parameter_become_one_group():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3))
    model[2].weight, model[3].bias = model[0].weight, model[1].bias
    assert [group.layers for group in per_layer(model)] == [("0", "2"), ("1", "3")]
    model[3].weight = model[0].weight  # now 3 ties both groups together
    assert [group.layers for group in per_layer(model)] == [("0", "1", "2", "3")]


def test_a_mapping_that_splits_a_shared_parameter_is_refused():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    with pytest.raises(UserError, match=r"'0.weight' and '1.weight' are one tensor but in two groups"):
        attach(model, by_mapping(model, {"0": "a", "1": "b"}), 1.0)


def test_a_layer_in_no_group_is_named():
    model = residual_like()
    with pytest.raises(UserError, match="'head' belongs to no clipping group"):
        by_mapping(model, {"stem": "a", "blocks.*": "b"})
    with pytest.raises(UserError, match=r"Parameter 'head.weight' belongs to no clipping group"):
        attach(model, per_layer(model)[:-1], 1.0)


def test_a_layer_in_two_groups_or_unknown_is_named():
    model = residual_like()
    with pytest.raises(UserError, match="in two groups"):
        attach(model, (*per_layer(model), Group("again", ("stem",))), 1.0)
    with pytest.raises(UserError, match="'nowhere'"):
        attach(model, (*per_layer(model), Group("extra", ("nowhere",))), 1.0)


def test_a_function_maps_layers_too():
    partition = by_mapping(residual_like(), lambda name: "norms" if name.endswith(".0") else "rest")
    assert sorted(names(partition)) == ["norms", "rest"]


def test_a_model_that_trains_nothing_is_refused():
    with pytest.raises(UserError, match="no trainable parameter"):
        flat(nn.Linear(2, 2).requires_grad_(False))
