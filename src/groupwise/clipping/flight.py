"""Which group passes are open: those of the forward pass that runs, and of microbatches that wait for their backward.

A pipeline runs forward passes of several microbatches before the first of them runs backward. Each microbatch has
passes of its own, and a backward pass reaches the passes of one microbatch only.
"""

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from groupwise.clipping.gate import GroupPass, GroupState, Member, Phase, Round
from groupwise.clipping.layouts import Layouts
from groupwise.errors import UserError

NOT_NAMED: Hashable = object()
"""The microbatch of an ordinary forward pass, outside `forward_of`."""


class Flights:
    """The open passes of one engine; `round` is the backward pass that runs, if any."""

    def __init__(self) -> None:
        self.round: Round | None = None
        self.open: dict[int, GroupPass] = {}
        self.layouts = Layouts()
        self.call: Any = None
        """The call of the outermost module that runs, a `patching.Call`."""
        self._microbatch = NOT_NAMED
        self._waiting: dict[Hashable, dict[int, GroupPass]] = {}

    def pass_of(self, group: GroupState, member: Member, batch: int, device: torch.device) -> GroupPass:
        """The group's open pass; a recomputation inside backward (checkpointing) joins the one that is running."""
        group_pass = self.open.get(group.index)
        if self.round is not None:
            if group_pass is None:
                raise UserError(
                    f"Layer {member.name!r} ran for the first time inside the backward pass: use checkpointing with "
                    "use_reentrant=False."
                )
            return group_pass
        if group_pass is None or group_pass.batch != batch:
            if group_pass is not None:
                self._give_up(group_pass, member, batch)
            group_pass = GroupPass(group, batch, device, self)
            self.open[group.index] = group_pass
        group_pass.note(member)
        return group_pass

    def _give_up(self, group_pass: GroupPass, member: Member, batch: int) -> None:
        """The pass of a forward whose losses never came, or of one with another batch size."""
        if self._microbatch is not NOT_NAMED:
            raise UserError(
                f"Layer {member.name!r} got a batch of {batch} in microbatch {self._microbatch!r}, which began "
                f"with {group_pass.batch}: give another forward pass another name, and the model's inputs the batch as "
                "first axis."
            )
        group_pass.probe = None

    @contextmanager
    def forward_of(self, microbatch: Hashable) -> Iterator[None]:
        """What runs inside waits for `backward(..., microbatch)`; a forward pass that fails is forgotten."""
        if self.round is not None or self._microbatch is not NOT_NAMED:
            raise UserError(
                f"forward_of({microbatch!r}) was entered inside another forward or backward pass of the engine: leave "
                "that first."
            )
        outer, self.open, self._microbatch = self.open, self._waiting.pop(microbatch, {}), microbatch
        try:
            yield
            if self.open:
                self._waiting[microbatch] = self.open
        finally:
            self.open, self._microbatch = outer, NOT_NAMED

    @contextmanager
    def backward(self, phase: Phase, examples: int, microbatch: Hashable = NOT_NAMED) -> Iterator[Round]:
        """Inside, the passes of a microbatch (or of the ordinary forward pass) take part; afterwards they are over."""
        self.refuse_nesting()
        outer = self.open
        if microbatch is not NOT_NAMED:
            if microbatch not in self._waiting:
                raise UserError(
                    f"Microbatch {microbatch!r} has no forward pass that waits: run the model with gradients on inside "
                    f"forward_of({microbatch!r}) first, once for each backward pass."
                )
            self.open = self._waiting.pop(microbatch)
        self.round = Round(phase, examples, self.open)
        try:
            yield self.round
        finally:
            self.round = None
            self.open.clear()
            self.open = outer

    def refuse_nesting(self) -> None:
        """Refuse a backward pass inside another one.

        Raises:
            UserError: one runs.
        """
        if self.round is not None:
            raise UserError("A backward pass was begun inside another one: end that first, they share one set of sums.")

    @contextmanager
    def looking(self, examples: int) -> Iterator[None]:
        """A backward pass inside leaves everything as it is: it is there for the gradients of layers' outputs."""
        self.round = Round(Phase.LOOK, examples, self.open)
        try:
            yield
        finally:
            self.round = None

    def forget(self) -> None:
        """Drop the microbatches that wait."""
        self._waiting.clear()
