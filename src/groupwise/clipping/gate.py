"""Clipping inside autograd: layers report squared norms to a probe, and a gate turns them into clipped sums.

`probe = Gate.apply(pass, device, *parameters)` is made just before the group's first layer runs, so its backward runs
once the backward pass has left that layer, when every member has added its squared norms to the probe's gradient. The
gate then *returns the clipped sums as the parameters' gradients*: microbatch accumulation, hooks and reductions on
gradients need no special case. The norms of all groups go to the engine, which counts them at once.
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from enum import Enum
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from groupwise.clipping.factors import ClipRule, keep_finite
from groupwise.clipping.joint import Entry, cross_terms, stack_calls
from groupwise.clipping.layouts import FIRST, Doubt, Layout, Order
from groupwise.clipping.rules.base import Finish, Gradients, LayerRule, Saved, Wanted
from groupwise.clipping.rules.folded import FoldedRule
from groupwise.clipping.squared_norms import LEAST_SQUARE
from groupwise.errors import UserError


class Phase(Enum):
    """What a backward pass does: everything at once, only norms (ghost, first), only sums (ghost, second), nothing."""

    CLIP = "clip"
    LOOK = "look"
    NORMS = "norms"
    SUMS = "sums"


@dataclass
class Round:
    """What is common to all groups in one backward pass."""

    phase: Phase
    examples: int
    passes: "dict[int, GroupPass]"
    """Those that take part, by group."""
    factors: Tensor | None = None
    """Ghost, second pass: None, or 0 for examples left out and 1 for the others."""
    squared_norms: dict[int, Tensor] = field(default_factory=dict)
    closed: set[int] = field(default_factory=set)
    reported: set[str] = field(default_factory=set)
    """Layers that returned their gradients themselves."""


@dataclass(frozen=True)
class Member:
    """A layer inside its group: its rule, which of its parameters train, and their places in the group."""

    name: str
    rule: LayerRule
    wanted: Wanted
    places: tuple[int | None, ...]
    rows: tuple[slice | None, ...] = ()
    """For each parameter the rows of it that it uses, None: all; () stands for all of all."""

    @property
    def label(self) -> str:
        """What messages call it."""
        return f"Layer {self.name!r}"

    def rows_of(self, parameter: int) -> slice | None:
        """The rows of its parameter of that number."""
        return self.rows[parameter] if self.rows else None


@dataclass
class GroupState:
    """A group's fixed parts and the threshold that is in force."""

    index: int
    name: str
    members: tuple[Member, ...]
    homes: tuple[tuple[torch.nn.Module, str], ...]
    """Where its trainable parameters are found: a module, and the name inside it."""
    names: tuple[str, ...]
    """Their names in the whole model."""
    gated: tuple[Tensor, ...]
    """What the gate returns gradients for: the parameters, or a stand-in that gets none where layers return them."""
    clip_rule: ClipRule
    threshold: Tensor
    """C_k, a scalar."""

    @property
    def parameters(self) -> tuple[torch.nn.Parameter, ...]:
        """Its trainable parameters as they are now (shards, between two passes under FSDP2)."""
        return tuple(module.get_parameter(name) for module, name in self.homes)

    def factors(self, squares: Tensor) -> Tensor:
        """Squared norms (n,) -> clip factors (n,), 0 where a norm is not finite."""
        threshold = self.threshold if self.threshold.dtype == squares.dtype else self.threshold.to(squares.dtype)
        factors = self.clip_rule(squares.clamp_min(LEAST_SQUARE).sqrt_(), threshold)
        return keep_finite(factors, squares.to(self.threshold.dtype))


class GroupPass:
    """One group in one forward and backward pass: the probe, what its layers handed in, and the sums so far."""

    def __init__(self, group: GroupState, batch: int, device: torch.device, flights: Any) -> None:
        self.group, self.batch, self.flights = group, batch, flights
        self.calls: list[Member] = []
        self.uses: dict[int, list[slice | None]] = {}
        self.copies: dict[int, Tensor] = {}
        """Parameters with a copy for each example, by their place."""
        self.uncertain = False
        """Whether some layer's rows may belong to the examples in another order than the one that was taken."""
        self.doubts: set[Doubt] = set()
        """The same of parameters that met a tensor, for `Layouts.trust`."""
        self.proven = False
        """Whether gradients have shown whose rows are whose, for the losses of this backward pass."""
        self.call = flights.call
        self.entries: list[Entry] = []
        self.due: list[tuple[Member, Finish]] = []
        self.sums: list[Tensor | None] = [None] * len(group.gated)
        self.squares: list[Tensor] = []
        self.done = False
        self.probe: Tensor | None = Gate.apply(self, device, *group.gated)

    def note(self, member: Member) -> None:
        """A forward pass calls a layer, which uses its parameters once more."""
        self.calls.append(member)
        for i, place in enumerate(member.places):
            if place is not None:
                self.uses.setdefault(place, []).append(member.rows_of(i))

    def receive(self, member: Member, layout: Layout, saved: Saved, g: Any) -> Tensor:
        """Take a layer's activations and output gradients; returns its squared norms, the probe's gradient."""
        current = self._current(member, layout, g)
        if current.phase is Phase.LOOK:
            return self.group.threshold.new_zeros(self.batch)
        rule, saved, g = self._examples_first(member, layout, saved, g)
        if current.phase is Phase.SUMS:
            self.add(member, rule.weighted_sum(saved, g, current.factors, member.wanted))
            return self.group.threshold.new_zeros(current.examples)
        joint = any(place is not None and overlap(self.uses[place]) for place in member.places)
        if current.phase is Phase.CLIP and len(self.calls) == 1:
            self.add(member, rule.clipped_sum(saved, g, self.clip, member.wanted))
            self.done = True
            return self.all_squares()
        if joint:
            self.entries.append(Entry(rule, member, saved, g))
            if rule.stacks:  # the norm of all its calls is formed at once, when the group closes
                return self.group.threshold.new_zeros(current.examples)
        if current.phase is Phase.NORMS:
            return rule.squared_norms(saved, g, member.wanted)
        squares, finish = rule.book_keep(saved, g, member.wanted)
        self.due.append((member, finish))
        return squares

    def _examples_first(self, member: Member, layout: Layout, saved: Saved, g: Any) -> tuple[LayerRule, Saved, Any]:
        """The call as if its tensors had the examples on their first axis, and the rule that takes it so."""
        rule, examples = member.rule, self.flights.round.examples
        if examples == 1:
            layout = FIRST if len(g) == 1 else Layout(Order.FOLDED, len(g))
        elif examples != self.batch and not self.proven:
            raise UserError(
                f"{member.label} has several rows for each of the losses, and it cannot be told whose they are: give "
                "the model inputs with the examples on the first axis."
            )
        if layout.order is Order.FIRST:
            return rule, saved, g
        if not rule.features_last:
            return FoldedRule(rule, layout), saved, g
        arranged = (layout.examples_first(t) if i in rule.batched and t is not None else t for i, t in enumerate(saved))
        return rule, tuple(arranged), layout.examples_first(g)

    def reported(self, squares: Tensor) -> Tensor:
        """Squared norms (examples,) as the probe's gradient, (B,), where B rows are fewer examples."""
        return squares if len(squares) == self.batch else F.pad(squares, (0, self.batch - len(squares)))

    def return_gradients(self, member: Member, saved: Saved, g: Any) -> tuple[Tensor, Gradients]:
        """The same for a layer that returns its gradients itself: its squared norms, and one gradient a parameter."""
        current = self._current(member, FIRST, g)
        if member.name in current.reported:
            raise UserError(
                f"Layer {member.name!r} runs twice in one forward pass, and with direct=True no norm joins the two: "
                "use a layer for each, or do without direct=True."
            )
        current.reported.add(member.name)
        if current.phase is Phase.NORMS:
            return member.rule.squared_norms(saved, g, member.wanted), (None,) * len(member.wanted)
        if current.phase is Phase.SUMS:
            gradients = member.rule.weighted_sum(saved, g, current.factors, member.wanted)
            return self.group.threshold.new_zeros(current.examples), gradients
        gradients = member.rule.clipped_sum(saved, g, self.clip, member.wanted)
        self.done = True
        return self.all_squares(), gradients

    def _current(self, member: Member, layout: Layout, g: Tensor) -> Round:
        """The backward pass that runs, if this layer's call can take part in it."""
        current: Round | None = self.flights.round
        if current is None:
            raise UserError(
                "Call engine.backward(losses) with one loss per example, not loss.backward(): losses must be summed."
            )
        if self.batch != current.examples and (current.examples == 0 or self.batch % current.examples):
            axis = 1 if layout.order is Order.SECOND else 0
            raise UserError(
                f"Layer {member.name!r} saw a batch of {g.shape[axis] // layout.each}, but there are "
                f"{current.examples} losses: the first axis of the model's inputs must be the batch, or attach with "
                "batch_axis=1 if it is the second."
            )
        if self.probe is None:
            raise UserError(
                "These losses come from a forward pass that is over: call engine.backward before the next one."
            )
        return current

    def clip(self, squares: Tensor) -> Tensor:
        """Squared norms (n,) of the next n examples -> their factors (n,), 0 where a norm is not finite."""
        self.squares.append(squares)
        return self.group.factors(squares)

    def all_squares(self) -> Tensor:
        """Squared norms (B,) of the whole round, once they are in."""
        return self.squares[0] if len(self.squares) == 1 else torch.cat(self.squares)

    def close(self, squares: Tensor) -> None:
        """All members have reported: form the factors, and the weighted sums that are still due."""
        current: Round = self.flights.round
        if current.passes.get(self.group.index) is not self:
            raise UserError(
                f"Group {self.group.name!r} ran forward for another microbatch than the one whose backward pass this "
                "is: a forward pass inside forward_of(m) needs its backward pass inside backward_of(m)."
            )
        current.closed.add(self.group.index)
        if current.phase is Phase.SUMS:
            return
        if not self.done and self.entries:
            squares = squares + self.joint_squares(squares, current.phase)
        if current.phase is Phase.NORMS:
            current.squared_norms[self.group.index] = squares
            return
        if not self.done:
            factors = self.clip(squares)
            while self.due:  # what a layer kept is freed as soon as its sum is made
                member, finish = self.due.pop()
                self.add(member, finish(factors))
        current.squared_norms[self.group.index] = self.all_squares()

    def joint_squares(self, like: Tensor, phase: Phase) -> Tensor:
        """What the layers' own reports miss of the joint norms of parameters that are used more than once, (B,)."""
        entries, self.entries = self.entries, []
        total = torch.zeros_like(like)
        with no_autocast(like.device.type):
            entries, stacked = stack_calls(entries)
            for entry in stacked:
                if phase is Phase.NORMS:
                    total = total + entry.rule.squared_norms(entry.saved, entry.g, entry.member.wanted)
                else:
                    squares, finish = entry.rule.book_keep(entry.saved, entry.g, entry.member.wanted)
                    self.due.append((entry.member, finish))
                    total = total + squares
            return total + cross_terms(entries, like)

    def add(self, member: Member, gradients: Gradients) -> None:
        """Add a layer's clipped sums to those of its group."""
        for i, (place, gradient) in enumerate(zip(member.places, gradients, strict=True)):
            if place is not None and gradient is not None:
                known = self.sums[place]
                if (rows := member.rows_of(i)) is not None:
                    if known is None:
                        known = self.sums[place] = torch.zeros_like(self.group.gated[place], dtype=gradient.dtype)
                    known[rows] += gradient
                else:
                    self.sums[place] = gradient if known is None else known.add_(gradient)


def overlap(uses: list[slice | None]) -> bool:
    """Whether two uses of a parameter, in all its rows (None) or in some, share an entry."""
    if len(uses) < 2:
        return False
    known = sorted((use.start, use.stop) for use in uses if use is not None)
    return len(known) < len(uses) or any(end > start for (_, end), (start, _) in pairwise(known))


def no_autocast(device: str) -> AbstractContextManager[object]:
    """Rules choose their own precision; entering autocast costs microseconds a layer, so only where it is on."""
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()


def autocast(kind: str, x: Tensor, parameters: list[Tensor | None]) -> tuple[Tensor, list[Tensor | None]]:
    """What autocast would do to a layer's inputs, so that the rule itself can run without it."""
    device = x.device.type
    if kind == "keep" or not torch.is_autocast_enabled(device):
        return x, parameters
    dtype = torch.get_autocast_dtype(device) if kind == "lower" else torch.float32
    return x.to(dtype), [None if p is None else p.to(dtype) for p in parameters]


class Gate(torch.autograd.Function):
    """Opens as a probe of B zeros; its backward closes the group and returns the clipped sums."""

    @staticmethod
    def forward(ctx: Any, group_pass: GroupPass, device: torch.device, *parameters: Tensor) -> Tensor:
        ctx.group_pass = group_pass
        return torch.zeros(group_pass.batch, device=device, dtype=torch.float64)  # so that norms add up in float64

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, squares: Tensor) -> Any:
        group_pass: GroupPass = ctx.group_pass
        with no_autocast(squares.device.type):
            group_pass.close(squares[: group_pass.flights.round.examples])
        sums, group_pass.sums, group_pass.probe = group_pass.sums, [], None
        return None, None, *sums
