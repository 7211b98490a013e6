"""From a partition of the layers to the engine's groups: which parameters train, where, and with which rule."""

import torch
from torch import nn

from groupwise.clipping.costs import Shared
from groupwise.clipping.discovery import Layer
from groupwise.clipping.factors import ClipRule
from groupwise.clipping.gate import GroupState, Member
from groupwise.clipping.partition import Group, Partition


def build_groups(
    layers: tuple[Layer, ...], partition: Partition, clip_rule: ClipRule, shared: Shared, thrifty: bool
) -> tuple[GroupState, ...]:
    """One `GroupState` a group; `thrifty` layers keep nothing for the sake of speed."""
    by_name = {layer.name: layer for layer in layers}
    uses: dict[int, int] = {}
    for layer in layers:
        for parameter in layer.trainable.values():
            uses[id(parameter)] = uses.get(id(parameter), 0) + 1
    groups = tuple(_build_group(k, group, by_name, uses, clip_rule, shared) for k, group in enumerate(partition))
    for member in (member for group in groups for member in group.members):
        member.rule.thrifty = thrifty
    return groups


def _build_group(
    index: int, group: Group, by_name: dict[str, Layer], uses: dict[int, int], clip_rule: ClipRule, shared: Shared
) -> GroupState:
    parameters: list[nn.Parameter] = []
    place: dict[int, int] = {}
    for name in group.layers:
        for parameter in by_name[name].trainable.values():
            if id(parameter) not in place:
                place[id(parameter)] = len(parameters)
                parameters.append(parameter)
    members = []
    for name in group.layers:
        layer = by_name[name]
        rule = layer.make_rule(shared)
        places = tuple(
            place[id(layer.trainable[local])] if local in layer.trainable else None for local in rule.parameter_names
        )
        tied = any(uses[id(p)] > 1 for p in layer.trainable.values())
        rule.alone = len(group.layers) == 1 and not tied
        members.append(Member(name, rule, tuple(p is not None for p in places), places, tied))
    dtype, device = parameters[0].dtype, parameters[0].device
    threshold = torch.ones((), dtype=dtype, device=device)
    return GroupState(
        index,
        group.name,
        tuple(members),
        tuple(parameters),
        clip_rule,
        threshold,
    )
