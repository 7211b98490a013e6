"""Makes the members of a group that are no layers of the model: single parameters, and products inside a module."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from groupwise.clipping.costs import Shared
from groupwise.clipping.flight import Flights
from groupwise.clipping.functions import CopiesFunction
from groupwise.clipping.gate import GroupState, Member
from groupwise.clipping.rules.base import LayerRule
from groupwise.clipping.rules.embedding import EmbeddingRule
from groupwise.clipping.rules.linear import LinearRule
from groupwise.clipping.rules.parameter import ParameterRule


@dataclass(frozen=True)
class Use:
    """One parameter of a product: where it stands in its group (None: it does not train), and which rows are used."""

    place: int | None
    shape: torch.Size
    rows: slice | None = None
    padding_idx: int | None = None


class Parts:
    """Members by what they do with which parameters, made when they are first used.

    Args:
        flights: where the passes of an engine are kept.
        shared: what its layers have in common.
    """

    def __init__(self, flights: Flights, shared: Shared) -> None:
        self._flights, self._shared = flights, shared
        self._members: dict[tuple[object, ...], Member] = {}

    def member(self, kind: str, group: GroupState, uses: tuple["Use | None", ...]) -> Member:
        """A "linear" or "embedding" layer of a group's parameters: its weight and its bias, if that trains.

        Args:
            kind: what it does with them.
            group: whose parameters they are.
            uses: one for each parameter; None where there is none, or it does not train.
        """
        key = (
            kind,
            group.index,
            *((u.place, u.rows and (u.rows.start, u.rows.stop), u.shape, u.padding_idx) for u in uses if u),
        )
        if key not in self._members:
            weight = uses[0]
            assert weight is not None
            rule: LayerRule
            with torch.device("meta"):
                if kind == "embedding":
                    rule = EmbeddingRule(
                        nn.Embedding(weight.shape[0], weight.shape[1], weight.padding_idx), self._shared
                    )
                else:
                    rule = LinearRule(nn.Linear(weight.shape[1], weight.shape[0], uses[1] is not None), self._shared)
            places = tuple(None if u is None else u.place for u in uses)
            name = next(group.names[place] for place in places if place is not None)
            rows = tuple(None if u is None else u.rows for u in uses)
            wanted = tuple(place is not None for place in places)
            self._members[key] = Member(name, rule, wanted, places, rows if any(rows) else ())
        return self._members[key]

    def copies(self, group: GroupState, place: int, batch: int) -> Tensor:
        """A parameter's copies (B, *shape), made once a forward pass."""
        member = self._parameter(group, place)
        parameter = group.parameters[place]
        group_pass = self._flights.open.get(group.index)
        if group_pass is not None and group_pass.batch == batch and place in group_pass.copies:
            return group_pass.copies[place]
        group_pass = self._flights.pass_of(group, member, batch, parameter.device)
        copies: Tensor = CopiesFunction.apply(group_pass, member, group_pass.probe, parameter.detach())
        group_pass.copies[place] = copies
        return copies

    def _parameter(self, group: GroupState, place: int) -> Member:
        key = ("parameter", group.index, place)
        if key not in self._members:
            rule = ParameterRule(*group.homes[place], self._shared)
            self._members[key] = Member(group.names[place], rule, (True,), (place,))
        return self._members[key]
