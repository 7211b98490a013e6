"""Proof that a backward pass reached every layer and every trainable parameter, and that these are still the same."""

from collections.abc import Sequence
from typing import NoReturn

from torch import nn

from groupwise.clipping.gate import GroupState, Round
from groupwise.errors import UserError


class Attached:
    """The parameters of a model as they were when an engine was attached.

    Args:
        model: whose layers' forwards are replaced.
        shards: parameters are swapped between shards and whole tensors (FSDP2), so only whether they train is known.
    """

    def __init__(self, model: nn.Module, shards: bool) -> None:
        self._model, self._shards = model, shards
        self._known = {name: (p, p.requires_grad, p.shape, p.dtype) for name, p in model.named_parameters()}

    def check_same(self) -> None:
        """Refuse a parameter that was added, taken away, replaced, frozen, thawed, or got another shape or dtype.

        Raises:
            UserError: naming the parameter.
        """
        seen = 0
        for name, parameter in self._model.named_parameters():
            known = self._known.get(name)
            if known is None:
                _refuse(name, "added or replaced")
            before, trained, shape, dtype = known
            seen += 1
            if parameter.requires_grad != trained:
                _refuse(name, "thawed" if parameter.requires_grad else "frozen")
            if not trained or self._shards:
                continue
            if parameter is not before:
                _refuse(name, "replaced by another tensor", " (to change its values, copy them into it)")
            if parameter.shape != shape or parameter.dtype != dtype:
                _refuse(name, f"made {parameter.dtype} of shape {tuple(parameter.shape)}")
        if seen < len(self._known):
            there = dict(self._model.named_parameters())
            _refuse(next(name for name in self._known if name not in there), "taken out of the model, or tied,")

    def check_gradients(self) -> None:
        """Refuse a parameter that trains and has no gradient.

        Raises:
            UserError: naming the parameter.
        """
        if self._shards:  # they may get their gradients later
            return
        for name, (parameter, trained, _, _) in self._known.items():
            if trained and parameter.grad is None:
                raise UserError(f"Parameter {name!r} trains but got no gradient: freeze it, or use it.")


def check_groups(groups: Sequence[GroupState], current: Round, direct: bool) -> None:
    """Refuse a group of which no layer took part; with `direct`, whose layers report themselves, a single layer.

    Raises:
        UserError: naming the group or the layer, and a parameter of it.
    """
    for group in groups:
        silent = [member for member in group.members if member.name not in current.reported] if direct else []
        if group.index not in current.closed or silent:
            member = silent[0] if silent else group.members[0]
            what = f"layer {member.name!r}" if silent else f"layer of group {group.name!r}"
            name = group.names[next(place for place in member.places if place is not None)]
            raise UserError(
                f"The losses reach no {what} (parameter {name!r} and the like): freeze its parameters, or use them in "
                "every forward pass (times 0, where they shall do nothing)."
            )


def _refuse(name: str, done: str, remedy: str = "") -> NoReturn:
    raise UserError(f"Parameter {name!r} was {done} after attaching: detach, then attach again{remedy}.")
