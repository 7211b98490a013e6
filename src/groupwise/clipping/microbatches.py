"""Keeps what the groups know between a forward pass and its backward pass, microbatch by microbatch.

A `GroupPass` is one group in one forward and backward pass. Layers hand it their squared norms and what makes their
sums; when all have, it forms the clip factors and the clipped sums. A pipeline runs forward passes of several
microbatches before the first of them runs backward: each microbatch has passes of its own, and a backward pass reaches
the passes of one microbatch only.
"""

from collections.abc import Hashable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor

from groupwise.clipping.clip_plan import ClipPlan
from groupwise.clipping.forward_pass import ForwardPass, Note
from groupwise.clipping.gradients import ClippedGradients
from groupwise.clipping.groups import ClippedLayer, ClippingGroup, clip_factors_of, most_kept
from groupwise.clipping.layouts import FIRST, Layout
from groupwise.clipping.norm_methods import are_kept
from groupwise.clipping.norm_terms import RowTerms, Terms, squares_together
from groupwise.clipping.phases import Phase, Recomputed
from groupwise.clipping.precision import no_autocast, refuse_float16
from groupwise.clipping.rules.base import Gradients, Saved, clipped_sum, total_numel
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

    def __init__(self, group: ClippingGroup, forward_pass: ForwardPass, passes: "OpenPasses") -> None:
        self.group, self.forward_pass, self._passes = group, forward_pass, passes
        self.batch = forward_pass.examples
        self.calls = 0
        self.uses: dict[int, list[slice | None]] = {}
        self.copies: dict[int, Tensor] = {}
        """Parameters with a copy for each example, by their place."""
        self.probe: Tensor | None = None
        """Zeros (B,) that tie the layers to the group in autograd's graph; made with the group's first layer."""
        self.over = False
        """Whether the group has closed, or its losses never came."""
        self.joint_calls: list[LayerCall] = []
        """Calls of parameters that are used more than once."""
        self.due: list[tuple[ClippedLayer, LayerCall | RowTerms]] = []
        """What the sums are made from once the factors are known: calls, or the gradients that they formed."""
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

    def note(self, member: ClippedLayer) -> None:
        """A forward pass calls a layer, which uses its parameters once more."""
        self.calls += 1
        for i, place in enumerate(member.parameter_indices):
            if place is not None:
                self.uses.setdefault(place, []).append(member.rows_of(i))

    def receive(self, member: ClippedLayer, layout: Layout, saved: Saved, g: Tensor) -> None:
        """Take a layer's activations and output gradients, for its norms and sums."""
        current, rule = self._current(), member.rule
        self.recomputed.note(current.phase, (g, *saved))
        if layout != FIRST and rule.features_last:
            batched = (
                layout.examples_first(t) if i in rule.batched and t is not None else t for i, t in enumerate(saved)
            )
            saved, g = tuple(batched), layout.examples_first(g)
        elif layout != FIRST:
            rule = FoldedRule(rule, layout)
        if current.phase is Phase.SUMS:
            self.add(member, rule.weighted_sum(saved, g, current.factors, member.wanted, member.context))
            return
        call = LayerCall(rule, member, saved, g)
        if self.calls > 1 and any(
            place is not None and overlap(self.uses[place]) for place in member.parameter_indices
        ):
            self.joint_calls.append(call)
            if rule.stacks:  # the norm of all its calls is formed at once, when the group closes
                return
        self._report(call)

    def return_gradients(self, member: ClippedLayer, saved: Saved, g: Tensor) -> Gradients:
        """The same for a layer that returns its gradients itself, one a parameter."""
        current = self._current()
        if member.name in current.reported:
            raise UserError(
                f"Layer {member.name!r} runs twice in one forward pass, and with direct=True no norm joins the two: "
                "use a layer for each, or do without direct=True."
            )
        current.reported.add(member.name)
        self.recomputed.note(current.phase, (g, *saved))
        if current.phase is Phase.NORMS:
            self.terms.append(member.rule.squared_norms(saved, g, member.wanted, member.context))
            return (None,) * len(member.wanted)
        if current.phase is Phase.SUMS:
            return member.rule.weighted_sum(saved, g, current.factors, member.wanted, member.context)
        self.done = True
        forms = member.rule.materializes(saved, g, member.wanted, member.context)
        return self._clipped_sum(LayerCall(member.rule, member, saved, g), forms)

    def _current(self) -> BackwardPass:
        """The backward pass that runs, if this group's calls can take part in it."""
        current = self.running
        if self.over:
            raise UserError("These losses come from a forward pass that is over: call backward before the next one.")
        self.received = True
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
                "Return the losses and let the private step run the backward pass: loss.backward() inside of them "
                "would not be clipped."
            )
        return current

    def clip(self, squares: Tensor) -> Tensor:
        """Squared norms (n,) of the next n examples -> their factors (n,), 0 where a norm is not finite."""
        self.squares.append(squares)
        return clip_factors_of([self.group], [squares])[0]

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
                "is: a forward pass inside forward(n, m) needs its backward pass inside backward_of(m)."
            )
        current.closed.add(self.group.index)
        return True

    def end(self) -> None:
        """Add its sums to the parameters' gradients; the pass is over."""
        for parameter, total in zip(self.group.inputs, self.sums, strict=True):
            if total is not None:
                self._passes.gradients.add(parameter, total)
        self.release()

    def release(self) -> None:
        """The pass is over: let go of all that leads back to the graph, which leads to it."""
        self.over, self.probe, self.sums = True, None, [None] * len(self.group.inputs)
        self.due, self.terms, self.joint_calls, self.copies = [], [], [], {}

    def report_joint(self) -> None:
        """Add what the layers' own reports miss of the joint norms of parameters that are used more than once."""
        if not self.joint_calls:
            return
        calls, self.joint_calls = self.joint_calls, []
        with no_autocast(calls[0].g.device.type):
            calls, stacked = stack_calls(calls)
            for call in stacked:
                self._report(call)
            if len(crossing := cross_terms(calls, self.batch)):
                self.terms += crossing

    def _report(self, call: LayerCall) -> None:
        """Take a call's squared norms, and what makes its sum once the factors are known."""
        rule, (saved, g), member = call.rule, (call.saved, call.g), call.member
        given = saved, g, member.wanted, member.context
        if self.running.phase is Phase.NORMS:
            self.terms.append(rule.squared_norms(*given))
            return
        kept, forms = total_numel(*(saved[i] for i in rule.batched), g), rule.materializes(*given)
        formed = rule.count(g) * rule.size(member.wanted) if forms else kept
        alone = self.calls == 1
        if alone and not (self.waits and formed <= most_kept(g)):
            self.add(member, self._clipped_sum(call, forms))
            self.done = True
        elif forms and (alone or are_kept(formed, kept)):
            rows = RowTerms(rule.all_gradients(saved, g, member.wanted))
            self.terms.append(rows)
            self.due.append((member, rows))
        else:
            self.terms.append(rule.squared_norms(*given))
            self.due.append((member, call))

    def _clipped_sum(self, call: LayerCall, forms: bool) -> Gradients:
        """The clipped sum of the group's only call, whose norms are found from gradients that it `forms`, or not."""
        rule, member, saved, g = call.rule, call.member, call.saved, call.g
        if forms:
            return clipped_sum(rule, saved, g, self.clip, member.wanted)
        squares = squares_together([[rule.squared_norms(saved, g, member.wanted, member.context)]])[0]
        return rule.weighted_sum(saved, g, self.clip(squares), member.wanted, member.context)

    def add(self, member: ClippedLayer, gradients: Gradients) -> None:
        """Add a layer's clipped sums to those of its group."""
        for i, (place, gradient) in enumerate(zip(member.parameter_indices, gradients, strict=True)):
            if place is not None and gradient is not None:
                known = self.sums[place]
                if (rows := member.rows_of(i)) is not None:
                    if known is None:
                        known = self.sums[place] = torch.zeros_like(self.group.inputs[place], dtype=gradient.dtype)
                    known[rows].add_(gradient)
                else:
                    self.sums[place] = gradient if known is None else known.add_(gradient)

    def add_weighted(self, call: LayerCall, factors: Tensor) -> None:
        """Add the sum of a call to those of its group; one in few rows is added to what another use has there."""
        rule, member = call.rule, call.member
        place, part = member.parameter_indices[0], member.rows_of(0)
        known = None if place is None else self.sums[place]
        if known is not None and rule.indexed:
            indices, rows = rule.weighted_rows(call.saved, call.g, factors)
            (known if part is None else known[part]).index_add_(0, indices, rows.to(known.dtype))
        else:
            self.add(member, rule.weighted_sum(call.saved, call.g, factors, member.wanted, member.context))


NOT_NAMED: Hashable = object()
"""The microbatch of an ordinary forward pass, which its backward pass follows at once."""


class OpenPasses:
    """The group passes of one engine that have run forward; `backward_pass` is the backward pass that runs, if any.

    Args:
        gradients: of the model's parameters, to which the clipped sums are added.
    """

    def __init__(self, gradients: ClippedGradients) -> None:
        self.gradients = gradients
        self.backward_pass: BackwardPass | None = None
        self.open: dict[int, GroupPass] = {}
        self.plan = ClipPlan()
        self.last: ForwardPass | None = None
        """The ordinary forward pass that waits for its backward pass."""
        self._forward_pass: ForwardPass | None = None
        self._waiting: dict[Hashable, dict[int, GroupPass]] = {}

    @property
    def forward_pass(self) -> ForwardPass:
        """The forward pass that runs, or runs once more in its backward pass."""
        assert self._forward_pass is not None, "layers run as they are outside of the engine's passes"
        return self._forward_pass

    @contextmanager
    def running(self, forward_pass: ForwardPass) -> Iterator[None]:
        """Inside, layers belong to this forward pass."""
        outer, self._forward_pass = self._forward_pass, forward_pass
        try:
            yield
        finally:
            self._forward_pass = outer
            forward_pass.ended = True

    def pass_of(self, group: ClippingGroup, member: ClippedLayer) -> GroupPass:
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
        if group_pass is None:
            refuse_float16(member.label, group.threshold.device.type)
            group_pass = self.open[group.index] = GroupPass(group, self.forward_pass, self)
        group_pass.note(member)
        return group_pass

    def together(self, group_pass: GroupPass) -> list[GroupPass]:
        """The passes that close with this one: those of the groups beside it that have no probe yet."""
        passes = []
        for group in group_pass.group.together or (group_pass.group,):
            other = self.open.setdefault(group.index, GroupPass(group, group_pass.forward_pass, self))
            if other is group_pass or (other.probe is None and not other.over):
                passes.append(other)
        return passes

    @contextmanager
    def forward(self, examples: int, microbatch: Hashable = NOT_NAMED, note: Note | None = None) -> Iterator[None]:
        """What runs inside is a forward pass of B examples; a named one waits for `backward(..., microbatch)`, and the
        next one is waited for by an ordinary one. One that fails is forgotten.

        Raises:
            UserError: inside of another pass.
        """
        if self.backward_pass is not None or self._forward_pass is not None:
            raise UserError("A forward pass was begun inside another pass of the engine: leave that first.")
        self.end()
        forward_pass = ForwardPass(examples, self.plan, note)
        try:
            with self.running(forward_pass):
                yield
        except BaseException:
            self.end()
            raise
        self.last = forward_pass
        if note is not None:
            self.end()
        elif microbatch is not NOT_NAMED:
            if self.open:  # gradients were on
                self._waiting[microbatch] = self.open
            self.open, self.last = {}, None

    @contextmanager
    def backward(self, phase: Phase, examples: int, microbatch: Hashable = NOT_NAMED) -> Iterator[BackwardPass]:
        """Inside, the passes of a microbatch (or of the ordinary forward pass) take part; afterwards they are over.

        Raises:
            UserError: inside another one; no forward pass of that name waits, or it had another number of examples.
        """
        self.refuse_nesting()
        outer = self.open
        if microbatch is not NOT_NAMED:
            if microbatch not in self._waiting:
                raise UserError(
                    f"Microbatch {microbatch!r} has no forward pass that waits: run the model with gradients on inside "
                    f"forward(examples, {microbatch!r}) first, once for each backward pass."
                )
            self.open = self._waiting.pop(microbatch)
        first = next(iter(self.open.values()), None)
        try:
            if first is not None and first.batch != examples:
                raise UserError(
                    f"{first.batch} examples ran forward, and {examples} are said to run backward: give the same "
                    "number."
                )
            self.backward_pass = BackwardPass(phase, examples, self.open)
            with nullcontext() if first is None else self.running(first.forward_pass):
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

    def forget(self) -> None:
        """Drop the microbatches that wait."""
        self._waiting.clear()

    def end(self) -> None:
        """The forward passes that are open get no losses."""
        self.last = None
        for group_pass in self.open.values():
            group_pass.release()
        self.open.clear()
