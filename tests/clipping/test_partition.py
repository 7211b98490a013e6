"""Partitions hold every trainable parameter in exactly one group; others are refused by name."""

import pytest
import torch
from torch import nn

from groupwise.clipping import Group, attach, by_mapping, flat, per_block, per_layer
from groupwise.errors import UserError
from tests.clipping.conftest import Scale


def residual_model() -> nn.Module:
    model = nn.Module()
    model.stem = nn.Conv2d(3, 4, 3)
    model.blocks = nn.Sequential(*(nn.Sequential(nn.GroupNorm(2, 4), nn.Conv2d(4, 4, 3)) for _ in range(3)))
    model.head = nn.Linear(4, 2)
    return model


def names(partition) -> list[str]:
    return [group.name for group in partition]


def test_per_layer_and_per_block_groups_are_in_model_order():
    partition = per_layer(residual_model())
    assert names(partition)[0] == "stem" and names(partition)[-1] == "head"
    assert all(len(group.layers) == 1 for group in partition) and len(partition) == 8
    model = residual_model()
    partition = per_block(model)
    assert names(partition) == ["stem", "blocks.0", "blocks.1", "blocks.2", "head"]
    assert partition[1].layers == ("blocks.0.0", "blocks.0.1")
    model.blocks[2][1].weight = model.blocks[0][1].weight  # blocks that share a parameter become one group
    partition = per_block(model)
    assert names(partition) == ["stem", "blocks.0", "blocks.1", "head"]
    assert partition[1].layers == ("blocks.0.0", "blocks.0.1", "blocks.2.0", "blocks.2.1")
    model = residual_model()
    model.blocks[2][0].weight = model.blocks[0][0].weight  # their first layers
    assert per_block(model) == partition


def test_layers_that_share_a_parameter_become_one_group():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3))
    model[2].weight, model[3].bias = model[0].weight, model[1].bias
    assert [group.layers for group in per_layer(model)] == [("0", "2"), ("1", "3")]
    model[3].weight = model[0].weight  # layer 3 connects both groups
    assert [group.layers for group in per_layer(model)] == [("0", "1", "2", "3")]


def test_a_mapping_that_splits_a_shared_parameter_is_refused():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    attach(model, by_mapping(model, {"*": "both"}), 1.0)
    with pytest.raises(UserError, match=r"'0.weight' and '1.weight' are one tensor but in two groups"):
        attach(model, by_mapping(model, {"0": "a", "1": "b"}), 1.0)


def scripted() -> nn.Module:
    return torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.Tanh()))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda m: by_mapping(m, {"stem": "a", "blocks.*": "b"}), "'head' belongs to no clipping group"),
        (lambda m: attach(m, per_layer(m)[:-1], 1.0), "Parameter 'head.weight' belongs to no clipping group"),
        (
            lambda m: by_mapping(m, {"stm*": "early", "*": "late"}),
            r"'stm\*' of clipping group 'early' matches no .* .there are 'stem'.: ",
        ),
        (lambda m: by_mapping(m, {"*": "all", "late*": "late"}), r"Pattern 'late\*'"),
        (
            lambda m: (m.stem.requires_grad_(False), by_mapping(m, {"stem": "early", "*": "late"})),
            r"Pattern 'stem' .* matches no trainable layer",
        ),
        (lambda m: attach(m, (*per_layer(m), Group("again", ("stem",))), 1.0), "in two groups"),
        (lambda m: attach(m, (*per_layer(m), *per_layer(m)), 1.0), "have the same name"),
        (lambda m: attach(m, (*per_layer(m), Group("extra", ("nowhere",))), 1.0), "'nowhere'"),
        (lambda m: flat(m.requires_grad_(False)), "no trainable parameter"),
        (lambda m: per_layer(scripted()), "^The model is TorchScript"),
        (lambda m: per_layer(nn.Sequential(scripted(), m)), "^Module '0' is TorchScript"),
    ],
)
def test_invalid_partitions_are_refused_by_name(make, message):
    with pytest.raises(UserError, match=message):
        make(residual_model())


def block(*more: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), *more)


@pytest.mark.parametrize(
    ("model", "groups"),
    [
        (lambda: nn.Sequential(block(), block()), ["0", "1"]),  # the model itself holds the blocks
        (lambda: nn.Sequential(block(), nn.Linear(2, 2)), ["0.0", "0.1", "1"]),  # one block is no sequence
        (lambda: nn.ModuleDict({"a": nn.ModuleList([block(), nn.Linear(2, 2), block()])}), ["a.0", "a.1", "a.2"]),
        (lambda: nn.Sequential(nn.Sequential(block(), block()), block()), ["0", "1"]),  # the outermost
        (lambda: nn.ModuleDict({"b": block(), "c": block()}), ["b.0", "b.1", "c.0", "c.1"]),
        (
            lambda: nn.ModuleDict(
                {"one": nn.Sequential(block(), block()), "onetwo": nn.ModuleList([block(), block()])}
            ),
            ["one.0", "one.1", "onetwo.0", "onetwo.1"],
        ),
        (lambda: nn.Linear(2, 2), [""]),
    ],
)
def test_blocks_are_found_in_nested_containers(model, groups):
    assert names(per_block(model())) == groups


def test_the_first_matching_pattern_wins_and_case_matters():
    model = nn.ModuleDict({"A": nn.Linear(2, 2), "a": nn.Linear(2, 2)})
    assert names(by_mapping(model, {"A": "first", "*": "rest"})) == ["first", "rest"]
    assert names(by_mapping(model, {"*": "rest", "A": "first"})) == ["rest"]


def test_running_statistics_of_instance_norm_are_refused():
    with pytest.raises(UserError, match=r"'1' .* mixes"):
        per_layer(nn.Sequential(nn.Linear(2, 2), nn.InstanceNorm1d(2, affine=True, track_running_stats=True)))
    assert names(per_layer(nn.Sequential(nn.Linear(2, 2), nn.InstanceNorm1d(2, affine=True)))) == ["0", "1"]


def test_half_precision_is_refused_for_trainable_parameters_only():
    model = nn.Sequential(nn.Linear(2, 2).half(), nn.Linear(2, 2).double(), nn.Linear(2, 2))
    with pytest.raises(UserError, match=r"Parameter '0\.weight' trains in torch\.float16"):
        per_layer(model)
    model[0].requires_grad_(False)
    assert names(per_layer(model)) == ["1", "2"]


def test_a_parameter_of_the_model_itself_is_named_without_a_dot():
    model = Scale(2)
    assert [group.layers for group in per_layer(model)] == [("",), ("inner",)]
    with pytest.raises(UserError, match="Parameter 'scale' belongs to no"):
        attach(model, (), 1.0)


def test_modules_with_own_parameters_are_layers_next_to_their_children():
    model = nn.Sequential(Scale(2), nn.Linear(2, 2), Scale(2), nn.Linear(2, 2))
    model[2].inner = Scale(2)
    assert names(per_layer(model)) == ["0", "0.inner", "1", "2", "2.inner", "2.inner.inner", "3"]
    frozen = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2), nn.Linear(2, 2, bias=False))
    frozen[0].requires_grad_(False)
    frozen[2].bias.requires_grad_(False)
    assert names(per_layer(frozen)) == ["2", "3"]
