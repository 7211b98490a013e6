"""Keeps what the groups know between a forward pass and its backward pass, microbatch by microbatch.

A `GroupPass` is one group in one forward and backward pass. Layers hand it their squared norms and what makes their
sums; when all have, it forms the clip factors and the clipped sums. A pipeline runs forward passes of several
microbatches before the first of them runs backward: each microbatch has passes of its own, and a backward pass reaches
the passes of one microbatch only.
"""

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from groupwise.clipping.factors import starts_kernels, with_gone
from groupwise.clipping.groups import ClippingGroup, Member
from groupwise.clipping.layouts import FIRST, Doubt, Layout, Layouts, ModelCall, Order, Pattern
from groupwise.clipping.norm_terms import Terms
from groupwise.clipping.phases import Phase, Recomputed
from groupwise.clipping.precision import no_autocast, refuse_float16
from groupwise.clipping.rules.base import Finish, Gradients, IndexedSum, LayerRule, RuleContext, Saved, Wanted
from groupwise.clipping.rules.per_example import FoldedRule
from groupwise.clipping.shared_parameters import LayerCall, cross_terms, overlap, stack_calls
from groupwise.errors import UserError


@dataclass
class BackwardPass:
    """What is common to all groups in one backward pass."""

    phase: Phase
    examples: int
    passes: "dict[int, GroupPass]"
    """Those that take part, by group."""
    factors: Tensor | None = None
    """Ghost, second pass: by what rows are multiplied, or None; 0 for examples left out."""
    squared_norms: dict[int, Tensor] = field(default_factory=dict)
    closed: set[int] = field(default_factory=set)
    reported: set[str] = field(default_factory=set)
    """Layers that returned their gradients themselves."""


class GroupPass:
    """One group in one forward and backward pass: the probe, what its layers handed in, and the sums so far."""

    def __init__(self, group: ClippingGroup, batch: int, passes: "OpenPasses") -> None:
        self.group, self.batch, self._passes = group, batch, passes
        self.calls = 0
        self.uses: dict[int, list[slice | None]] = {}
        self.copies: dict[int, Tensor] = {}
        """Parameters with a copy for each example, by their place."""
        self.uncertain = False
        """Whether some layer's rows may belong to the examples in another order than the one that was taken."""
        self.doubts: set[Doubt] = set()
        """The same of parameters that met a tensor, for `Layouts.trust`."""
        self.proven = False
        """Whether gradients have shown whose rows are whose, for the losses of this backward pass."""
        self.model_call = passes.model_call
        """The call of the model that it belongs to, for what runs once more in the backward pass."""
        self.probe: Tensor | None = None
        """Zeros (B,) whose gradient is the group's squared norms; made with the group's first layer."""
        self.over = False
        """Whether the group has closed, or its losses never came."""
        self.joint_calls: list[LayerCall] = []
        """Calls of parameters that are used more than once."""
        self.due: list[tuple[Member, Finish]] = []
        self.sums: list[Tensor | None] = [None] * len(group.inputs)
        self.squares: list[Tensor] = []
        """Squared norms that factors were formed from, one part of the batch after the other."""
        self.terms: list[Terms | Tensor] = []
        """What its layers reported of their squared norms."""
        self.recomputed = Recomputed()
        self.received = self.done = False
        """Whether a layer's gradients have come; whether the sums are there already."""

    @property
    def waits(self) -> bool:
        """Whether it closes with other groups, so that its sums may wait for theirs."""
        return len(self.group.together) > 1

    def passes_together(self) -> "list[GroupPass]":
        """The passes that close with it, itself included."""
        return self._passes.together(self) if self.waits else [self]

    def note(self, member: Member) -> None:
        """A forward pass calls a layer, which uses its parameters once more."""
        self.calls += 1
        for i, place in enumerate(member.places):
            if place is not None:
                self.uses.setdefault(place, []).append(member.rows_of(i))

    def receive(self, member: Member, layout: Layout, saved: Saved, g: Tensor) -> None:
        """Take a layer's activations and output gradients, for its norms and sums."""
        current = self._current(member, layout, g)
        if current.phase is Phase.LOOK:
            return
        self.received = True
        self.recomputed.note(current.phase, (g, *saved))
        rule, saved, g = self._examples_first(member, layout, saved, g)
        given = (saved, g, member.wanted, member.context)
        if current.phase is Phase.SUMS:
            self.add(member, rule.weighted_sum(saved, g, current.factors, member.wanted, member.context))
            return
        alone = current.phase is Phase.CLIP and self.calls == 1
        if alone and not (self.waits and rule.defers(*given)):
            self.add(member, rule.clipped_sum(saved, g, self.clip, member.wanted, member.context))
            self.done = True
            return
        if any(place is not None and overlap(self.uses[place]) for place in member.places):
            self.joint_calls.append(LayerCall(rule, member, saved, g))
            if rule.stacks:  # the norm of all its calls is formed at once, when the group closes
                return
        self._report(rule, member, given)

    def _examples_first(
        self, member: Member, layout: Layout, saved: Saved, g: Tensor
    ) -> tuple[LayerRule, Saved, Tensor]:
        """The call as if its tensors had the examples on their first axis, and the rule that takes it so."""
        rule, examples = member.rule, self.running.examples
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

    def return_gradients(self, member: Member, saved: Saved, g: Tensor) -> Gradients:
        """The same for a layer that returns its gradients itself, one a parameter."""
        current = self._current(member, FIRST, g)
        if len(g) != current.examples:
            raise UserError(
                f"Layer {member.name!r} saw {len(g)} rows for {current.examples} losses, and with direct=True it can "
                "not be told whose they are: give it one row for each example, or do without direct=True (FSDP)."
            )
        if member.name in current.reported:
            raise UserError(
                f"Layer {member.name!r} runs twice in one forward pass, and with direct=True no norm joins the two: "
                "use a layer for each, or do without direct=True."
            )
        current.reported.add(member.name)
        self.received = True
        self.recomputed.note(current.phase, (g, *saved))
        if current.phase is Phase.NORMS:
            self.terms.append(member.rule.norm_terms(saved, g, member.wanted, member.context))
            return (None,) * len(member.wanted)
        if current.phase is Phase.SUMS:
            return member.rule.weighted_sum(saved, g, current.factors, member.wanted, member.context)
        self.done = True
        return member.rule.clipped_sum(saved, g, self.clip, member.wanted, member.context)

    def _current(self, member: Member, layout: Layout, g: Tensor) -> BackwardPass:
        """The backward pass that runs, if this layer's call can take part in it."""
        current = self.running
        if self.batch != current.examples and (current.examples == 0 or self.batch % current.examples):
            axis = 1 if layout.order is Order.SECOND else 0
            raise UserError(
                f"Layer {member.name!r} saw a batch of {g.shape[axis] // layout.each}, but there are "
                f"{current.examples} losses: the batch must be the first axis of the model's first input, or give "
                "batch_axis=1 if it is the second."
            )
        if self.over:
            raise UserError("These losses come from a forward pass that is over: call backward before the next one.")
        return current

    @property
    def running(self) -> BackwardPass:
        """The backward pass that runs.

        Raises:
            UserError: none of the engine's does.
        """
        current = self._passes.backward_pass
        if current is None:
            raise UserError(
                "Give one loss per example to private.backward (engine.backward), not loss.backward(); gradients that "
                "are for no step, such as one to the input, are taken inside engine.bypassed()."
            )
        return current

    def clip(self, squares: Tensor) -> Tensor:
        """Squared norms (n,) of the next n examples -> their factors (n,), 0 where a norm is not finite."""
        self.squares.append(squares)
        factors = self.group.factors(squares)
        if not starts_kernels(factors):
            return factors
        return with_gone(factors.to(self.group.threshold.dtype), self.group.masks)

    def begin_closing(self) -> bool:
        """Whether the group takes part in the backward pass that runs, of which it is marked as closed.

        Raises:
            UserError: outside of the engine's backward passes, or in that of another microbatch.
        """
        current = self.running
        if not self.received:
            return False
        if current.passes.get(self.group.index) is not self:
            raise UserError(
                f"Group {self.group.name!r} ran forward for another microbatch than the one whose backward pass this "
                "is: a forward pass inside forward_of(m) needs its backward pass inside backward_of(m)."
            )
        current.closed.add(self.group.index)
        return True

    def take_sums(self) -> list[Tensor | None]:
        """What the group returns as the gradients of `group.inputs`; the pass is over."""
        sums, self.sums, self.over, self.probe = self.sums, [], True, None
        return sums or [None] * len(self.group.inputs)

    def report_joint(self) -> None:
        """Add what the layers' own reports miss of the joint norms of parameters that are used more than once."""
        if not self.joint_calls:
            return
        calls, self.joint_calls = self.joint_calls, []
        with no_autocast(calls[0].g.device.type):
            calls, stacked = stack_calls(calls)
            for call in stacked:
                self._report(call.rule, call.member, (call.saved, call.g, call.member.wanted, call.member.context))
            if len(crossing := cross_terms(calls, self.batch)):
                self.terms += crossing

    def _report(self, rule: LayerRule, member: Member, given: tuple[Saved, Tensor, Wanted, RuleContext]) -> None:
        """Add a call's squared norms to the group's, and to what is due its sum, unless norms are all that is asked."""
        if self.running.phase is Phase.NORMS:
            self.terms.append(rule.norm_terms(*given))
            return
        for terms, finish in rule.book_keep_all(*given):
            self.terms.append(terms)
            self.due.append((member, finish))

    def add(self, member: Member, gradients: Gradients) -> None:
        """Add a layer's clipped sums to those of its group."""
        for i, (place, gradient) in enumerate(zip(member.places, gradients, strict=True)):
            if place is not None and gradient is not None:
                known = self.sums[place]
                if (rows := member.rows_of(i)) is not None:
                    if known is None:
                        known = self.sums[place] = torch.zeros_like(self.group.inputs[place], dtype=gradient.dtype)
                    known[rows].add_(gradient)
                else:
                    self.sums[place] = gradient if known is None else known.add_(gradient)

    def add_rows(self, member: Member, finish: IndexedSum, factors: Tensor) -> None:
        """Add a sum in few rows to that of another use of the parameter, if there is one."""
        place, part = member.places[0], member.rows_of(0)
        known = None if place is None else self.sums[place]
        if known is None:
            self.add(member, finish(factors))
            return
        indices, rows = finish.rows(factors)
        (known if part is None else known[part]).index_add_(0, indices, rows.to(known.dtype))


NOT_NAMED: Hashable = object()
"""The microbatch of an ordinary forward pass, outside `forward_of`."""


class OpenPasses:
    """The group passes of one engine that have run forward; `backward_pass` is the backward pass that runs, if any."""

    def __init__(self) -> None:
        self.backward_pass: BackwardPass | None = None
        self.open: dict[int, GroupPass] = {}
        self.layouts = Layouts()
        self.model_call: ModelCall | None = None
        """The call of the outermost module that runs."""
        self.asked: dict[str, list[Pattern]] = {}
        """How the calls since the last backward pass were taken, by their layer or parameter."""
        self._microbatch = NOT_NAMED
        self._waiting: dict[Hashable, dict[int, GroupPass]] = {}

    def pass_of(self, group: ClippingGroup, member: Member, batch: int) -> GroupPass:
        """The group's open pass; a recomputation inside backward (checkpointing) joins the one that is running."""
        group_pass = self.open.get(group.index)
        if self.backward_pass is not None:
            if group_pass is None:
                raise UserError(
                    f"Layer {member.name!r} ran for the first time inside the backward pass: use checkpointing with "
                    "use_reentrant=False."
                )
            group_pass.recomputed.on = True
            return group_pass
        refuse_float16(member.label, group.threshold.device.type)
        if group_pass is None or group_pass.batch != batch:
            if group_pass is not None:
                self._give_up(group_pass, member, batch)
            group_pass = GroupPass(group, batch, self)
            self.open[group.index] = group_pass
        group_pass.note(member)
        return group_pass

    def note(self, label: str, layout: Layout) -> None:
        """A layer, or a parameter, met a tensor, which was taken so; running once more (checkpointing) adds nothing."""
        if self.backward_pass is None and layout.pattern is not None:
            self.asked.setdefault(label, []).append(layout.pattern)

    def together(self, group_pass: GroupPass) -> list[GroupPass]:
        """The passes that close with this one: those of the groups beside it that have no probe yet."""
        passes = []
        for group in group_pass.group.together or (group_pass.group,):
            other = self.open.setdefault(group.index, GroupPass(group, group_pass.batch, self))
            if other is group_pass or (other.probe is None and not other.over and other.batch == group_pass.batch):
                passes.append(other)
        return passes

    def _give_up(self, group_pass: GroupPass, member: Member, batch: int) -> None:
        """The pass of a forward whose losses never came, or of one with another batch size."""
        if self._microbatch is not NOT_NAMED and group_pass.calls:
            raise UserError(
                f"Layer {member.name!r} got a batch of {batch} in microbatch {self._microbatch!r}, which began "
                f"with {group_pass.batch}: give another forward pass another name, and the model's inputs the batch as "
                "first axis."
            )
        group_pass.over, group_pass.probe = True, None

    @contextmanager
    def forward_of(self, microbatch: Hashable) -> Iterator[None]:
        """What runs inside waits for `backward(..., microbatch)`; a forward pass that fails is forgotten."""
        if self.backward_pass is not None or self._microbatch is not NOT_NAMED:
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
    def backward(self, phase: Phase, examples: int, microbatch: Hashable = NOT_NAMED) -> Iterator[BackwardPass]:
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
        self.backward_pass = BackwardPass(phase, examples, self.open)
        try:
            yield self.backward_pass
        finally:
            self.backward_pass = None
            self.end()  # also after an error: a probe's node holds the passes that hold it
            self.open = outer

    def refuse_nesting(self) -> None:
        """Refuse a backward pass inside another one.

        Raises:
            UserError: one runs.
        """
        if self.backward_pass is not None:
            raise UserError("A backward pass was begun inside another one: end that first, they share one set of sums.")

    @contextmanager
    def looking(self, examples: int) -> Iterator[None]:
        """A backward pass inside leaves everything as it is: it is there for the gradients of layers' outputs."""
        self.backward_pass = BackwardPass(Phase.LOOK, examples, self.open)
        try:
            yield
        finally:
            self.backward_pass = None

    def forget(self) -> None:
        """Drop the microbatches that wait, and what was asked of them: a pipeline's are looked at once alone."""
        self._waiting.clear()
        self.asked = {}

    def end(self) -> None:
        """The forward passes that are open get no losses."""
        for group_pass in self.open.values():
            group_pass.over, group_pass.probe = True, None
        self.open.clear()
