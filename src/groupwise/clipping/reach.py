"""Proof that a backward pass reached every layer and every trainable parameter."""

from collections.abc import Sequence

from torch import nn

from groupwise.clipping.gate import GroupState, Round
from groupwise.errors import UserError


def check_groups(groups: Sequence[GroupState], current: Round, direct: bool) -> None:
    """Refuse a group of which no layer took part; with `direct`, whose layers report themselves, a single layer.

    Raises:
        UserError: naming the group or the layer.
    """
    for group in groups:
        silent = [member.name for member in group.members if member.name not in current.reported] if direct else []
        if group.index not in current.closed or silent:
            what = f"layer {silent[0]!r}" if silent else f"layer of group {group.name!r}"
            raise UserError(f"The losses reach no {what}: freeze its parameters, or use them.")


def check_gradients(model: nn.Module) -> None:
    """Refuse a parameter that trains and has no gradient.

    Raises:
        UserError: naming the parameter.
    """
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.grad is None:
            raise UserError(f"Parameter {name!r} trains but got no gradient: freeze it, or use it.")
