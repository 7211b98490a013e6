"""Clips one group of layers in one microbatch: collects what its layers report, and adds the clipped sums to .grad.

In the backward pass each layer reports its squared norms, and keeps per-example gradients, or activations and output
gradients. When all layers have reported, the group closes: it forms the clip factors and the clipped sums, together
with groups that close at the same time.
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
    """One group in one microbatch's pass: the probe, what its layers reported, and the sums so far."""

    def __init__(self, group: ClippingGroup, microbatch: Pass) -> None:
        self.group, self.microbatch = group, microbatch
        self.calls = 0
        self.uses: dict[int, list[slice | None]] = {}
        self.copies: dict[int, Tensor] = {}
        """Copies of parameters, one per example, by the parameter's index in the group."""
        self.probe: Tensor | None = None
        """Zeros (B,) that connect the layers to the group in the autograd graph; made when its first layer runs."""
        self.over = False
        """Whether the group has closed, or its pass has ended without a backward pass."""
        self.received = False
        """Whether a layer has reported."""
        self.terms: list[Terms | Tensor] = []
        """The squared norms that its layers reported, or terms to compute them from."""
        self.due: list[tuple[ClippedLayer, LayerCall | RowTerms]] = []
        """What the sums are formed from once the factors are known: calls, or their per-example gradients."""
        self.joint_calls: list[LayerCall] = []
        """Calls of parameters that are used more than once."""
        self.clipped: list[Tensor] = []
        """Squared norms of a layer that was clipped at once, one tensor per chunk of examples."""
        self.sums: list[Tensor | None] = [None] * len(group.summed)

    @property
    def waits(self) -> bool:
        """Whether the group closes together with others, so that its sums may be formed with theirs."""
        return len(self.group.together) > 1

    def note(self, member: ClippedLayer) -> None:
        """Count a call of a layer, and the parameters that it uses."""
        self.calls += 1
        for place, rows in zip(member.parameter_indices, member.rows, strict=True):
            if place is not None:
                self.uses.setdefault(place, []).append(rows)

    def running(self) -> Pass:
        """Its pass, if the backward pass of that is running.

        Raises:
            UserError: another backward pass is running, or none; the pass has ended; create_graph=True was given.
        """
        if torch.is_grad_enabled():
            raise UserError(
                "Clipped gradients have no derivative: run the backward pass without create_graph=True. Replace "
                "derivatives of the model by its input (PINN, gradient penalty) by finite differences."
            )
        running = self.microbatch.passes.running
        if running is None or running.phase is None:
            raise UserError(
                "Return the losses and let the private step run the backward pass: the gradients of loss.backward() "
                "inside of them would not be clipped."
            )
        if self.over:
            raise UserError("These losses come from a forward pass that is over: call backward before the next one.")
        if running is not self.microbatch:
            raise UserError(
                f"Group {self.group.name!r} ran forward in another microbatch than this backward pass: a forward pass "
                "inside forward(n, m) needs its backward pass inside backward_of(m)."
            )
        return running

    # -- reports of layers ----------------------------------------------------------------------------------------

    def receive(self, member: ClippedLayer, layout: Layout, saved: Saved, g: Tensor) -> Gradients:
        """Take the activations and output gradients of a call.

        Returns:
            The clipped sums, if the layer itself returns them to autograd (`ClippingGroup.direct`); else ().
        """
        running, rule = self.running(), member.rule
        self.received = True
        if self.group.direct:
            if member.name in running.reported:
                raise UserError(
                    f"Layer {member.name!r} runs twice in one forward pass, and with direct=True their joint norm is "
                    "unknown: use one layer for each call, or do without direct=True."
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
            if rule.stacks:  # the joint norm of all its calls is computed when the group closes
                return sums
        return self._report(call, running.phase) or sums

    def _report(self, call: LayerCall, phase: Phase | None) -> Gradients:
        """Compute a call's squared norms, and keep what its sum needs until the factors are known."""
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
        """Squared norms (n,) of the next n examples -> their clip factors, 0 where a norm is not finite."""
        self.clipped.append(squares)
        return clip_factors_of([self.group], [squares])[0]

    def report_joint(self) -> None:
        """For parameters that are used more than once, add the cross terms that single calls do not report."""
        if not self.joint_calls:
            return
        calls, self.joint_calls = self.joint_calls, []
        calls, stacked = stack_calls(calls)
        for call in stacked:
            self._report(call, self.microbatch.phase)
        self.terms += cross_terms(calls, self.microbatch.examples)

    # -- sums -----------------------------------------------------------------------------------------------------

    def add(self, member: ClippedLayer, gradients: Gradients) -> Gradients:
        """Add a layer's clipped sums to those of its group; return them instead if the group is `direct`."""
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
        """Add a call's weighted sum to those of its group; an embedding's is added in place, to its rows alone."""
        rule: Any = call.rule
        place, part = call.member.parameter_indices[0], call.member.rows[0]
        known = None if place is None else self.sums[place]
        if known is not None and rule.indexed:
            indices, rows = rule.weighted_rows(*without_dropped(call, factors), factors.values)
            (known if part is None else known[part]).index_add_(0, indices, rows.to(known.dtype))
        else:
            self.add(call.member, weighted_sum(call, factors))

    def end(self) -> None:
        """Add the group's sums to the parameters' gradients, and finish."""
        for parameter, total in zip(self.group.summed, self.sums, strict=True):
            if total is not None:
                self.microbatch.passes.gradients.add(parameter, total)
        self.release()

    def release(self) -> None:
        """Finish: break the reference cycles with the autograd graph."""
        self.over, self.probe, self.sums = True, None, [None] * len(self.group.summed)
        self.due, self.terms, self.joint_calls, self.copies = [], [], [], {}


def close(passes: Sequence[GroupPass]) -> None:
    """Close groups whose layers have all reported: form the clip factors, and add the clipped sums to .grad.

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
    """Squared norms (B,) of each group, from its layers' reports."""
    for each in passes:
        each.report_joint()
    squares = squares_together([each.terms for each in passes])
    for each in passes:
        each.terms = []
    return squares


def weighted_sum(call: LayerCall, factors: Factors | None) -> Gradients:
    """Σ_i factor_i · g^(i) for each parameter of a call, without dropped examples."""
    values = None if factors is None else factors.values
    return call.rule.weighted_sum(*without_dropped(call, factors), values, call.member.wanted)


def without_dropped(call: LayerCall, factors: Factors | None) -> tuple[Saved, Tensor]:
    """A call's saved tensors and output gradients, with zeros in the rows of dropped examples."""
    if factors is None or factors.dropped is None:
        return call.saved, call.g
    return call.rule.without(call.saved, call.g, factors.dropped)


def _add_sums(passes: Sequence[GroupPass], squares: list[Tensor]) -> None:
    """Form the clip factors from the squared norms, and the sums that were waiting for them."""
    joined: dict[int, list[tuple[GroupPass, ClippedLayer, RowTerms, Factors]]] = {}
    for each, factors in zip(passes, clip_factors_of([each.group for each in passes], squares), strict=True):
        each.due.sort(key=lambda due: isinstance(due[1], LayerCall) and due[1].rule.indexed)  # embeddings last
        while each.due:  # frees what a layer kept as soon as its sum is formed
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
