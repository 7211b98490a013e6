"""Clips one group of layers in one microbatch: from what its layers hand in to the sums that are added to .grad.

In the backward pass layers hand in their squared norms and what makes their sums. When all have, the group closes: it
forms the clip factors and with them the clipped sums, together with groups that close at the same time.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from groupwise.clipping.clip_plan import FIRST, Layout
from groupwise.clipping.factors import Factors
from groupwise.clipping.groups import ClippedLayer, ClippingGroup, clip_factors_of, most_kept
from groupwise.clipping.norm_methods import are_kept
from groupwise.clipping.norm_terms import RowTerms, Terms, joined_sums, squares_together
from groupwise.clipping.passes import Pass, Phase
from groupwise.clipping.rules.base import FoldedRule, Gradients, Saved, add_up, clipped_sum, total_numel
from groupwise.clipping.shared_parameters import LayerCall, cross_terms, overlap, stack_calls
from groupwise.errors import UserError


class GroupPass:
    """One group in one microbatch's pass: the probe, what its layers handed in, and the sums so far."""

    def __init__(self, group: ClippingGroup, microbatch: Pass) -> None:
        self.group, self.microbatch = group, microbatch
        self.calls = 0
        self.uses: dict[int, list[slice | None]] = {}
        self.copies: dict[int, Tensor] = {}
        """Parameters with a copy for each example, by their place."""
        self.probe: Tensor | None = None
        """Zeros (B,) that tie the layers to the group in autograd's graph; made with the group's first layer."""
        self.over = False
        """Whether the group has closed, or its losses never came."""
        self.received = False
        """Whether a layer's gradients have come."""
        self.terms: list[Terms | Tensor] = []
        """What its layers reported of their squared norms."""
        self.due: list[tuple[ClippedLayer, LayerCall | RowTerms]] = []
        """What the sums are made from once the factors are known: calls, or the gradients that they formed."""
        self.joint_calls: list[LayerCall] = []
        """Calls of parameters that are used more than once."""
        self.clipped: list[Tensor] = []
        """Squared norms that a layer was clipped by at once, one part of the batch after the other."""
        self.sums: list[Tensor | None] = [None] * len(group.summed)

    @property
    def waits(self) -> bool:
        """Whether it closes with other groups, so that its sums may wait for theirs."""
        return len(self.group.together) > 1

    def note(self, member: ClippedLayer) -> None:
        """A forward pass calls a layer, which uses its parameters once more."""
        self.calls += 1
        for place, rows in zip(member.parameter_indices, member.rows, strict=True):
            if place is not None:
                self.uses.setdefault(place, []).append(rows)

    def running(self) -> Pass:
        """The pass that it is part of, whose backward pass runs.

        Raises:
            UserError: it does not, or is over; the gradients would have derivatives.
        """
        if torch.is_grad_enabled():
            raise UserError(
                "Clipped gradients have no derivative: run the backward pass without create_graph=True. Losses with "
                "derivatives of the model by its input (PINN, gradient penalty, score matching) are not supported; "
                "with finite differences they are."
            )
        running = self.microbatch.passes.running
        if running is None or running.phase is None:
            raise UserError(
                "Return the losses and let the private step run the backward pass: loss.backward() inside of them "
                "would not be clipped."
            )
        if self.over:
            raise UserError("These losses come from a forward pass that is over: call backward before the next one.")
        if running is not self.microbatch:
            raise UserError(
                f"Group {self.group.name!r} ran forward for another microbatch than the one whose backward pass this "
                "is: a forward pass inside forward(n, m) needs its backward pass inside backward_of(m)."
            )
        return running

    # -- what layers hand in --------------------------------------------------------------------------------------

    def receive(self, member: ClippedLayer, layout: Layout, saved: Saved, g: Tensor) -> Gradients:
        """Take a call's activations and output gradients, for its norms and sums.

        Returns:
            The sums, where the layer returns them to autograd itself (`ClippingGroup.direct`).
        """
        running, rule = self.running(), member.rule
        self.received = True
        if self.group.direct:
            if member.name in running.reported:
                raise UserError(
                    f"Layer {member.name!r} runs twice in one forward pass, and with direct=True no norm joins the "
                    "two: use a layer for each, or do without direct=True."
                )
            running.reported.add(member.name)
        if layout == FIRST:
            pass
        elif rule.features_last:
            batched = (
                layout.examples_first(t) if i in rule.batched and t is not None else t for i, t in enumerate(saved)
            )
            saved, g = tuple(batched), layout.examples_first(g)
        else:
            rule = FoldedRule(rule, layout)
        call = LayerCall(rule, member, saved, g)
        sums: Gradients = ()
        if running.phase is Phase.SUMS:
            sums = self.add(member, weighted_sum(call, running.factors))
            if not running.recomputes:
                return sums
        if self.calls > 1 and any(
            len(self.uses[place]) > 1 and overlap(self.uses[place])
            for place in member.parameter_indices
            if place is not None
        ):
            self.joint_calls.append(call)
            if rule.stacks:  # the norm of all its calls is formed at once, when the group closes
                return sums
        return self._report(call, running.phase) or sums

    def _report(self, call: LayerCall, phase: Phase | None) -> Gradients:
        """Take a call's squared norms, and what makes its sum once the factors are known."""
        rule, member, saved, g, wanted = call.rule, call.member, call.saved, call.g, call.member.wanted
        closed = rule.squared_norms(saved, g, wanted)
        if phase is Phase.CLIP:
            forms, alone, held, formed = closed is None, self.calls == 1, 0, 0
            if forms or (alone and self.waits):
                held = total_numel(*(saved[i] for i in rule.batched), g)
                formed = rule.count(g) * rule.size(wanted) if forms else held
            if alone and not (self.waits and formed <= most_kept(g)):
                if closed is None:
                    return self.add(member, clipped_sum(rule, saved, g, self._factors, wanted))
                return self.add(member, weighted_sum(call, self._factors(squares_together([[closed]])[0])))
            if forms and (alone or are_kept(formed, held)):
                rows = RowTerms(rule.all_gradients(saved, g, wanted))
                self.terms.append(rows)
                self.due.append((member, rows))
                return ()
            self.due.append((member, call))
        self.terms.append(rule.formed_norms(saved, g, wanted) if closed is None else closed)
        return ()

    def _factors(self, squares: Tensor) -> Factors:
        """Squared norms (n,) of the next n examples -> their factors, 0 where a norm is not finite."""
        self.clipped.append(squares)
        return clip_factors_of([self.group], [squares])[0]

    def report_joint(self) -> None:
        """Add what the layers' own reports miss of the joint norms of parameters that are used more than once."""
        if not self.joint_calls:
            return
        calls, self.joint_calls = self.joint_calls, []
        calls, stacked = stack_calls(calls)
        for call in stacked:
            self._report(call, self.microbatch.phase)
        self.terms += cross_terms(calls, self.microbatch.examples)

    # -- sums -----------------------------------------------------------------------------------------------------

    def add(self, member: ClippedLayer, gradients: Gradients) -> Gradients:
        """Add a layer's clipped sums to those of its group; or return them, where the layer does."""
        if self.group.direct:
            return gradients
        for place, rows, gradient in zip(member.parameter_indices, member.rows, gradients, strict=True):
            if place is not None and gradient is not None:
                known = self.sums[place]
                if rows is not None:
                    if known is None:
                        known = self.sums[place] = torch.zeros_like(self.group.summed[place], dtype=gradient.dtype)
                    known[rows].add_(gradient)
                else:
                    self.sums[place] = gradient if known is None else known.add_(gradient)
        return ()

    def add_weighted(self, call: LayerCall, factors: Factors) -> None:
        """Add the sum of a call to those of its group; one in few rows is added to what another use has there."""
        rule: Any = call.rule
        place, part = call.member.parameter_indices[0], call.member.rows[0]
        known = None if place is None else self.sums[place]
        if known is not None and rule.indexed:
            indices, rows = rule.weighted_rows(*without_dropped(call, factors), factors.values)
            (known if part is None else known[part]).index_add_(0, indices, rows.to(known.dtype))
        else:
            self.add(call.member, weighted_sum(call, factors))

    def end(self) -> None:
        """Add its sums to the parameters' gradients; it is over."""
        for parameter, total in zip(self.group.summed, self.sums, strict=True):
            if total is not None:
                self.microbatch.passes.gradients.add(parameter, total)
        self.release()

    def release(self) -> None:
        """It is over: let go of all that leads back to the graph, which leads to it."""
        self.over, self.probe, self.sums = True, None, [None] * len(self.group.summed)
        self.due, self.terms, self.joint_calls, self.copies = [], [], [], {}


def close(passes: Sequence[GroupPass]) -> None:
    """The layers of groups that close together have reported: form factors, and add the clipped sums to .grad.

    Raises:
        UserError: see `GroupPass.running`.
    """
    running = passes[0].running()
    there = [each for each in passes if each.received]
    running.closed.update(each.group.index for each in there)
    if running.phase is not Phase.SUMS or running.recomputes:
        waiting = [each for each in there if not each.clipped]
        squares = total_squares(waiting)
        if running.phase is Phase.CLIP and waiting:
            _add_sums(waiting, squares)
        found = running.squared_norms_again if running.phase is Phase.SUMS else running.squared_norms
        found |= {each.group.index: rows for each, rows in zip(waiting, squares, strict=True)}
        for each in there:
            if parts := each.clipped:
                running.squared_norms[each.group.index] = parts[0] if len(parts) == 1 else torch.cat(parts)
    for each in passes:
        each.end()


def total_squares(passes: Sequence[GroupPass]) -> list[Tensor]:
    """Squared norms (examples,) of each group, from what its layers have reported."""
    for each in passes:
        each.report_joint()
    squares = squares_together([each.terms for each in passes])
    for each in passes:
        each.terms = []
    return squares


def weighted_sum(call: LayerCall, factors: Factors | None) -> Gradients:
    """Σ_i factor_i · g^(i) for each parameter of a call; examples that are left out count as zeros."""
    values = None if factors is None else factors.values
    return call.rule.weighted_sum(*without_dropped(call, factors), values, call.member.wanted)


def without_dropped(call: LayerCall, factors: Factors | None) -> tuple[Saved, Tensor]:
    """What a call has saved, and its output gradients, with zeros for examples that are left out."""
    if factors is None or factors.dropped is None:
        return call.saved, call.g
    return call.rule.without(call.saved, call.g, factors.dropped)


def _add_sums(passes: Sequence[GroupPass], squares: list[Tensor]) -> None:
    """Factors from the norms, and with them the sums that are due."""
    joined: dict[int, list[tuple[GroupPass, ClippedLayer, RowTerms, Factors]]] = {}
    for each, factors in zip(passes, clip_factors_of([each.group for each in passes], squares), strict=True):
        each.due.sort(key=lambda due: isinstance(due[1], LayerCall) and due[1].rule.indexed)  # after other uses
        while each.due:  # what a layer kept is freed as soon as its sum is made
            member, due = each.due.pop(0)
            if isinstance(due, LayerCall):
                each.add_weighted(due, factors)
            elif due.joined is None:
                each.add(member, add_up([(factors, due.gradients)]))
            else:
                joined.setdefault(id(due.joined), []).append((each, member, due, factors))
    for some in joined.values():
        sums = joined_sums([rows for _, _, rows, _ in some], [factors for *_, factors in some])
        for (each, member, _, _), total in zip(some, sums, strict=True):
            each.add(member, total)
