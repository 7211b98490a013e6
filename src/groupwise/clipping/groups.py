"""From a partition of the layers to the engine's groups: which parameters train, where, and with which rule."""

import torch
from torch import nn

from groupwise.clipping.costs import Shared
from groupwise.clipping.discovery import Layer
from groupwise.clipping.factors import ClipRule
from groupwise.clipping.gate import GroupState, Member
from groupwise.clipping.partition import Group, Partition
from groupwise.clipping.rules.parameter import ParameterRule
from groupwise.errors import UserError


def build_groups(
    layers: tuple[Layer, ...],
    partition: Partition,
    clip_rule: ClipRule,
    shared: Shared,
    *,
    thrifty: bool,
    direct: bool,
) -> tuple[GroupState, ...]:
    """One `GroupState` a group; `thrifty` layers keep nothing for the sake of speed, `direct` ones use no gate.

    Raises:
        UserError: a layer that cannot be `direct`, or would have to be.
    """
    by_name = {layer.name: layer for layer in layers}
    uses: dict[int, int] = {}
    for layer in layers:
        for parameter in layer.trainable.values():
            uses[id(parameter)] = uses.get(id(parameter), 0) + 1
    groups = tuple(
        _build_group(k, group, by_name, uses, clip_rule, shared, direct) for k, group in enumerate(partition)
    )
    for member in (member for group in groups for member in group.members):
        member.rule.thrifty = thrifty
    if direct:
        _check_direct(groups, uses, ghost=thrifty)
    else:
        _check_whole(layers)
    return groups


def _build_group(
    index: int,
    group: Group,
    by_name: dict[str, Layer],
    uses: dict[int, int],
    clip_rule: ClipRule,
    shared: Shared,
    direct: bool,
) -> GroupState:
    parameters: list[nn.Parameter] = []
    homes: list[tuple[nn.Module, str]] = []
    names: list[str] = []
    place: dict[int, int] = {}
    for name in group.layers:
        for local, parameter in by_name[name].trainable.items():
            if id(parameter) not in place:
                place[id(parameter)] = len(parameters)
                parameters.append(parameter)
                homes.append((by_name[name].module, local))
                names.append(by_name[name].full_name(local))
    members = []
    for name in group.layers:
        layer = by_name[name]
        if layer.rule is None:
            members += [
                Member(layer.full_name(local), ParameterRule(layer.module, local, shared), (True,), (place[id(p)],))
                for local, p in layer.trainable.items()
            ]
            continue
        rule = layer.make_rule(shared)
        places = tuple(
            place[id(layer.trainable[local])] if local in layer.trainable else None for local in rule.parameter_names
        )
        rule.alone = len(group.layers) == 1 and all(uses[id(p)] == 1 for p in layer.trainable.values())
        members.append(Member(name, rule, tuple(p is not None for p in places), places))
    dtype, device = parameters[0].dtype, parameters[0].device
    return GroupState(
        index,
        group.name,
        tuple(members),
        tuple(homes),
        tuple(names),
        (torch.zeros((), dtype=dtype, device=device, requires_grad=True),) if direct else tuple(parameters),
        clip_rule,
        torch.ones((), dtype=dtype, device=device),
    )


def _check_direct(groups: tuple[GroupState, ...], uses: dict[int, int], ghost: bool) -> None:
    """Refuse what one layer alone cannot clip."""
    for group in groups:
        for member in group.members:
            if isinstance(member.rule, ParameterRule):
                kind = type(member.rule.module).__name__
                raise UserError(
                    f"Parameter {member.name!r} is in a module ({kind}) without a rule, which cannot return gradients "
                    "itself (direct=True): register a rule for it, or freeze it."
                )
            if any(uses[id(group.parameters[place])] > 1 for place in member.places if place is not None):
                raise UserError(
                    f"Layer {member.name!r} shares a parameter with another layer, and with direct=True no norm joins "
                    "the two: untie them."
                )
        if len(group.members) > 1 and not ghost:
            raise UserError(
                f"Layer {group.members[0].name!r} shares group {group.name!r} with others, and with direct=True it "
                "returns its gradients before the group's norm is known: use one group a layer, or flat with "
                "norms='ghost'."
            )


def _check_whole(layers: tuple[Layer, ...]) -> None:
    """Refuse parameters in shards: a gate would hold on to what is whole only while its layer runs."""
    for layer in layers:
        for local, parameter in layer.trainable.items():
            if hasattr(parameter, "placements"):  # a DTensor, without importing torch.distributed
                raise UserError(
                    f"Parameter {layer.full_name(local)!r} is in shards (fully_shard): attach with direct=True."
                )
