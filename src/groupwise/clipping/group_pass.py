"""Clips one group of layers in one microbatch: collects what its layers report, and adds the clipped sums to .grad.

In the backward pass each call of a layer reports its squared norms, and keeps per-example gradients, or activations and
output gradients. A group counts its calls. It closes once all have reported: it forms the clip factors and the clipped
sums, and adds the sums to .grad. Several groups may close together. The parameters themselves are not in the graph. So
if autograd finds a gradient for a parameter, that gradient has bypassed its group, and is refused.

A sharded parameter (FSDP2) is a whole tensor only while its layer runs, so a group cannot add to it later. Such
parameters are in the graph, and their layer itself returns the clipped sums to autograd. The layer must then know the
norm: either it is a group by itself, or there are two backward passes.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from groupwise.clipping.clip_plan import FIRST, Layout
from groupwise.clipping.factors import Factors, keep_finite
from groupwise.clipping.groups import ClippedLayer, ClippingGroup, LayerCall
from groupwise.clipping.norm_methods import are_kept
from groupwise.clipping.norm_terms import RowTerms, Terms, joined_sums, squares_together
from groupwise.clipping.passes import Pass, Phase
from groupwise.clipping.precision import LEAST_SQUARE, refuse_float16
from groupwise.clipping.rules.base import FoldedRule, Gradients, Saved, add_up, clipped_sum, total_numel
from groupwise.clipping.shared_parameters import cross_terms, overlap, stack_calls
from groupwise.errors import UserError

Report = Callable[[Saved, Tensor], Gradients]
"""`GroupPass.receive` of one layer and layout."""


def enter(running: Pass, member: ClippedLayer, layout: Layout) -> Report:
    """Register a layer's call with its group in this pass; returns a callback for its activations and output gradients.

    A recomputed call (checkpointing) joins the same group pass. Raises a `UserError` under autocast to float16, inside
    torch.vmap, and for a layer that is first called in the backward pass.
    """
    group = member.group
    if torch._C._are_functorch_transforms_active():
        raise UserError(
            f"{member.label} runs inside torch.vmap or another transform of torch.func, where it cannot be clipped: "
            "run it on the whole batch (matmul or einsum take several axes), or freeze it."
        )
    if group.index not in running.groups:
        if running.phase is not None:
            raise UserError(
                f"Layer {member.name!r} ran for the first time inside the backward pass: use checkpointing with "
                "use_reentrant=False."
            )
        refuse_float16(member.label, group.threshold.device.type)
        together: list[GroupPass] = []
        for each in group.together or (group,):
            running.groups[each.index] = GroupPass(each, running, together)
            together.append(running.groups[each.index])
    found: GroupPass = running.groups[group.index]
    if running.phase is not None:
        running.recomputes = True
    else:
        found.calls += 1
        found.waiting += 1
        for parameter, rows in zip(member.parameters, member.rows, strict=True):
            if parameter is not None:
                found.uses.setdefault(parameter, []).append(rows)
    return partial(found.receive, member, layout)


class GroupPass:
    """One group in one microbatch's pass: what its layers reported, and the sums so far.

    It closes with the groups of `together`, itself included, once no call of any of them is `waiting` to report.
    """

    def __init__(self, group: ClippingGroup, microbatch: Pass, together: list["GroupPass"]) -> None:
        self.group, self.microbatch, self.together = group, microbatch, together
        self.calls = self.waiting = 0
        """How often its layers have run forward, and how many of these calls have not reported."""
        self.uses: dict[nn.Parameter, list[slice | None]] = {}
        """The rows of each parameter that each call uses; None: all rows."""
        self.copies: dict[nn.Parameter, Tensor] = {}
        """Copies of parameters, one per example."""
        self.over = False
        """Whether the group has closed, or its pass has ended without a backward pass."""
        self.received = False
        """Whether a call has reported."""
        self.terms: list[Terms | Tensor] = []
        """The squared norms that its layers reported, or terms to compute them from."""
        self.due: list[tuple[ClippedLayer, LayerCall | RowTerms]] = []
        """What the sums are formed from once the factors are known: calls, or their per-example gradients."""
        self.joint_calls: list[LayerCall] = []
        """Calls of parameters that are used more than once."""
        self.clipped: list[Tensor] = []
        """Squared norms of a layer that was clipped at once, one tensor per chunk of examples."""
        self.sums: dict[nn.Parameter, Tensor] = {}
        """The clipped sums of the parameters so far."""

    def running(self) -> Pass:
        """Its pass, whose backward pass must be running, without create_graph=True; else raises a `UserError`."""
        if torch.is_grad_enabled():
            raise UserError(
                "Clipped gradients have no derivative: run the backward pass without create_graph=True. Replace "
                "derivatives of the model by its input (PINN, gradient penalty) by finite differences."
            )
        running = self.microbatch.passes.running
        if running is None or running.phase is None:
            raise UserError(
                "The losses compute gradients themselves (backward, autograd.grad), which would not be clipped: return "
                "the losses, let the private step run the backward pass, and replace derivatives by finite differences "
                "or, for adversarial examples, by those of a frozen copy of the model, made before make_private."
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
        """Take the activations and output gradients of a call; returns the clipped sums, if the layer itself returns
        them to autograd (`ClippingGroup.direct`), else ()."""
        running = self.running()
        self.received = True
        sums = self._take(member, layout, saved, g, running)
        self.waiting -= 1
        if not any(each.waiting for each in self.together):
            close(running, self.together)
        return sums

    def _take(self, member: ClippedLayer, layout: Layout, saved: Saved, g: Tensor, running: Pass) -> Gradients:
        if self.group.direct:
            if member.name in running.reported:
                raise UserError(
                    f"Layer {member.name!r} runs twice in one forward pass, and with direct=True their joint norm is "
                    "unknown: use one layer for each call, or do without direct=True."
                )
            running.reported.add(member.name)
        call = LayerCall(member.rule, member, saved, g)
        if layout != FIRST:
            call = _batch_first(call, layout)
        sums: Gradients = ()
        if running.phase == "sums":
            sums = self.add(member, weighted_sum(call, running.factors))
            if not running.recomputes:
                return sums
        if self.calls > 1 and any(overlap(self.uses[p]) for p in member.parameters if p is not None):
            self.joint_calls.append(call)
            if call.rule.stacks:  # the joint norm of all its calls is computed when the group closes
                return sums
        return self._report(call, running.phase) or sums

    def _report(self, call: LayerCall, phase: Phase | None) -> Gradients:
        """Compute a call's squared norms, and keep what its sum needs until the factors are known."""
        rule, member, saved, g, wanted = call.rule, call.member, call.saved, call.g, call.member.wanted
        squares = rule.squared_norms(saved, g, wanted)  # None: to be computed from per-example gradients
        if phase == "clip":
            alone, activations, kept = self.calls == 1, 0, 0
            waits = alone and bool(self.group.together)  # so that the small sums of several groups are formed at once
            if squares is None or waits:
                activations = total_numel(*(saved[i] for i in rule.batched), g)
                kept = rule.count(g) * rule.size(wanted) if squares is None else activations
            if alone and not (waits and kept <= self.group.most_kept):
                if squares is None:
                    return self.add(member, clipped_sum(rule, saved, g, self._clip, wanted))
                return self.add(member, weighted_sum(call, self._clip(squares_together([[squares]])[0])))
            if squares is None and (alone or are_kept(kept, activations)):
                rows = RowTerms(rule.all_gradients(saved, g, wanted))
                self.terms.append(rows)
                self.due.append((member, rows))
                return ()
            self.due.append((member, call))
        self.terms.append(rule.formed_norms(saved, g, wanted) if squares is None else squares)
        return ()

    def _clip(self, squares: Tensor) -> Factors:
        """Squared norms (n,) of the next n examples -> their clip factors, 0 where a norm is not finite."""
        self.clipped.append(squares)
        return clip_factors_of([self.group], [squares])[0]

    def total_terms(self) -> list[Terms | Tensor]:
        """What its layers reported, with the cross terms of parameters that are used more than once."""
        if self.joint_calls:
            calls, stacked = stack_calls(self.joint_calls)
            for call in stacked:
                self._report(call, self.microbatch.phase)
            self.terms += cross_terms(calls, self.microbatch.examples)
        terms, self.terms, self.joint_calls = self.terms, [], []
        return terms

    # -- sums -----------------------------------------------------------------------------------------------------

    def add(self, member: ClippedLayer, gradients: Gradients) -> Gradients:
        """Add a layer's clipped sums to those of its group; return them instead if the group is `direct`."""
        if self.group.direct:
            return gradients
        for parameter, rows, gradient in zip(member.parameters, member.rows, gradients, strict=True):
            if parameter is None or gradient is None:
                continue
            known = self.sums.get(parameter)
            if rows is None:
                self.sums[parameter] = gradient if known is None else known.add_(gradient)
            else:
                known = self.sums[parameter] = gradient.new_zeros(parameter.shape) if known is None else known
                known[rows].add_(gradient)
        return ()

    def add_in_place(self, call: LayerCall, factors: Factors) -> bool:
        """Add the weighted sum of an embedding to its rows alone, if the group has a sum of that weight already."""
        rule: Any = call.rule
        weight, part = call.member.parameters[0], call.member.rows[0]
        known = None if weight is None else self.sums.get(weight)
        if known is None:
            return False
        saved, g = call.saved, call.g
        if factors.dropped is not None:
            saved, g = rule.without(saved, g, factors.dropped)
        indices, rows = rule.weighted_rows(saved, g, factors.values)
        (known if part is None else known[part]).index_add_(0, indices, rows.to(known.dtype))
        return True

    def release(self) -> None:
        """Finish: break the reference cycles with the autograd graph."""
        self.over = True
        self.due, self.terms, self.joint_calls, self.copies, self.sums = [], [], [], {}, {}


@torch.no_grad()
def close_rest(running: Pass) -> None:
    """Close the groups of a pass some of whose calls did not report, as the losses do not depend on their outputs."""
    for each in running.groups.values():
        if each.received and not each.over:
            close(running, each.together)


def close(running: Pass, passes: Sequence[GroupPass]) -> None:
    """Close groups whose layers have reported: form the clip factors, and add the clipped sums to .grad."""
    waiting = []
    for each in passes:
        if each.received:
            if parts := each.clipped:
                running.squared_norms[each.group.index] = parts[0] if len(parts) == 1 else torch.cat(parts)
            else:
                waiting.append(each)
    if waiting and (running.phase != "sums" or running.recomputes):
        squares = squares_together([each.total_terms() for each in waiting])
        if running.phase == "clip":
            _add_sums(waiting, squares)
        found = running.squared_norms_again if running.phase == "sums" else running.squared_norms
        for each, rows in zip(waiting, squares, strict=True):
            found[each.group.index] = rows
    for each in passes:
        for parameter, total in each.sums.items():
            running.passes.gradients.add(parameter, total)
        each.release()


def _batch_first(call: LayerCall, layout: Layout) -> LayerCall:
    """The call with the batch on the first axis of its tensors, or with a rule for their layout."""
    rule, saved = call.rule, call.saved
    if not rule.features_last:
        return replace(call, rule=FoldedRule(rule, layout))
    moved = (layout.examples_first(t) if i in rule.batched and t is not None else t for i, t in enumerate(saved))
    return replace(call, saved=tuple(moved), g=layout.examples_first(call.g))


def clip_factors_of(groups: Sequence[ClippingGroup], squares: Sequence[Tensor]) -> list[Factors]:
    """Clip factors of each group from its squared norms (n,), 0 where a norm is not finite."""
    first = groups[0]
    every, dtype = torch.stack(list(squares)), first.threshold.dtype
    thresholds = torch.stack([group.threshold for group in groups]).to(every.dtype)
    factors = first.clip_rule(every.clamp_min(LEAST_SQUARE).sqrt_(), thresholds.unsqueeze(1))
    values, dropped = Factors.of(keep_finite(factors, every, dtype).to(dtype), first.masks)
    return list(map(Factors, values.unbind(), [None] * len(groups) if dropped is None else dropped.unbind()))


def weighted_sum(call: LayerCall, factors: Factors | None) -> Gradients:
    """Σ_i factor_i · g^(i) for each parameter of a call, without dropped examples."""
    saved, g, values = call.saved, call.g, None
    if factors is not None:
        values = factors.values
        if factors.dropped is not None:
            saved, g = call.rule.without(saved, g, factors.dropped)
    return call.rule.weighted_sum(saved, g, values, call.member.wanted)


def _add_sums(passes: Sequence[GroupPass], squares: list[Tensor]) -> None:
    """Form the clip factors from the squared norms, and the sums that were waiting for them."""
    joined: dict[int, list[tuple[GroupPass, ClippedLayer, RowTerms, Factors]]] = {}
    for each, factors in zip(passes, clip_factors_of([each.group for each in passes], squares), strict=True):
        each.due.sort(key=lambda due: isinstance(due[1], LayerCall) and due[1].rule.indexed)  # embeddings last
        while each.due:  # frees what a layer kept as soon as its sum is formed
            member, due = each.due.pop(0)
            if isinstance(due, LayerCall):
                if not (due.rule.indexed and each.add_in_place(due, factors)):
                    each.add(member, weighted_sum(due, factors))
            elif due.joined is None:
                each.add(member, add_up([(factors, due.gradients)]))
            else:
                joined.setdefault(id(due.joined), []).append((each, member, due, factors))
    for some in joined.values():
        sums = joined_sums([rows for _, _, rows, _ in some], [factors for *_, factors in some])
        for (each, member, _, _), total in zip(some, sums, strict=True):
            each.add(member, total)
