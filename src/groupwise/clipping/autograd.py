"""Puts clipping inside autograd: layers report squared norms, and their group adds clipped sums to .grad.

A group's `GroupFunction` runs just before the group's first layer and gives a probe, B zeros, to all its layers. So its
backward runs once the backward pass has left the first layer, when every layer has reported its squared norms. It then
closes the group (norms, factors and sums, at once for groups that close together) and adds the clipped sums to the
parameters' gradients. The parameters themselves are no part of the graph, so that a gradient which autograd finds for
one bypasses its group, and is refused.

Parameters in shards become whole tensors only while their layer runs (FSDP2), and a group has nothing whole to add to.
They are part of the graph, and their layer returns their sums itself. That takes a norm which one layer knows, or two
backward passes.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from groupwise.clipping.clip_plan import Layout
from groupwise.clipping.group_pass import GroupPass, close
from groupwise.clipping.groups import ClippedLayer
from groupwise.clipping.passes import Pass
from groupwise.clipping.precision import autocast, no_autocast, refuse_float16
from groupwise.clipping.rules.base import Gradients, LayerRule, Saved
from groupwise.errors import UserError

Report = Callable[[Saved, Tensor], Gradients]
"""`GroupPass.receive` of one layer and layout."""


def enter(running: Pass, member: ClippedLayer, layout: Layout) -> tuple[Report, Tensor | None]:
    """A layer runs, for its group in this pass; what runs once more (checkpointing) joins what has run before.

    Groups that close together get their probes (B,) with the first of their layers.

    Returns:
        What takes the call's activations and output gradients; and the group's probe, None once it has closed.
    """
    group = member.group
    found: GroupPass | None = running.groups.get(group.index)
    if running.phase is not None:
        if found is None:
            raise UserError(
                f"Layer {member.name!r} ran for the first time inside the backward pass: use checkpointing with "
                "use_reentrant=False."
            )
        running.recomputes = True
    else:
        if found is None:
            refuse_float16(member.label, group.threshold.device.type)
            found = running.groups[group.index] = GroupPass(group, running)
        found.note(member)
    if found.probe is None and not found.over:
        every = (running.groups.setdefault(g.index, GroupPass(g, running)) for g in group.together or (group,))
        passes = [each for each in every if each is found or (each.probe is None and not each.over)]
        for each, probe in zip(passes, GroupFunction.apply(passes, *(p.group.anchor for p in passes)), strict=True):
            each.probe = probe
    return partial(found.receive, member, layout), found.probe


class GroupFunction(torch.autograd.Function):
    """From the anchors of groups that close together to a probe each, B zeros.

    Its backward runs when the layers of all of them have reported; it closes the groups.
    """

    @staticmethod
    def forward(ctx: Any, passes: list[GroupPass], *anchors: Tensor) -> tuple[Tensor, ...]:
        ctx.passes = passes
        ctx.set_materialize_grads(False)  # layers report to their groups, so that probes have none
        return torch.zeros(len(passes), passes[0].microbatch.examples, device=anchors[0].device).unbind()

    @staticmethod
    def backward(ctx: Any, *_: Tensor | None) -> Any:
        close(ctx.passes)
        return (None,) * (1 + len(ctx.passes))


class LayerFunction(torch.autograd.Function):
    """A layer's own forward and input gradient; the gradients of its parameters come from its group.

    Parameters come in a list, in which autograd does not look for inputs: they get no gradient from here. Shards come
    after it instead, and get theirs.
    """

    @staticmethod
    def forward(
        ctx: Any,
        report: Report,
        rule: LayerRule,
        parameters: list[Tensor | None],
        probe: Tensor,
        x: Tensor,
        *shards: Tensor | None,
    ) -> Tensor:
        ctx.report, ctx.rule, ctx.shards = report, rule, len(shards)
        if shards:
            _, parameters = autocast(rule.autocast, x, list(shards))  # in here, so that gradients stay float32
        with no_autocast(x.device.type):
            y, saved = rule.forward(x, *parameters)
        ctx.save_for_backward(*saved)
        return _changeable(y, (x, *saved)) if y._is_view() else y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        saved, rule = ctx.saved_tensors, ctx.rule
        g = rule.arrange(saved, g)
        gx, saved = rule.begin_backward(saved, g, ctx.needs_input_grad[4])
        sums = ctx.report(saved, g)
        return None, None, None, None, gx, *(sums or (None,) * ctx.shards)


def _changeable(y: Tensor, kept: tuple[Tensor | None, ...]) -> Tensor:
    """A view as an output that may be changed in place, as a layer's own may: of nothing that backward needs."""
    memory = y.untyped_storage().data_ptr()
    if any(t is not None and t.untyped_storage().data_ptr() == memory for t in kept):
        return y.clone()
    return torch.ops.aten._unsafe_view(y, y.shape)


class ReportFunction(torch.autograd.Function):
    """A tensor, no part of the graph so far, whose gradient a member of the group gets as its output gradient.

    Copies of a parameter, one for each example, are such a tensor: their gradients are the per-example gradients. So
    are zeros (B, T, p), as if added to T products with one weight whose inputs come one after the other (recurrence):
    with these inputs, (B, T, d), their gradients are those of one linear layer on a sequence.
    """

    @staticmethod
    def forward(ctx: Any, report: Report, saved: list[Any], probe: Tensor, made: Tensor) -> Tensor:
        ctx.report, ctx.saved = report, saved
        return made

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        ctx.report(tuple(ctx.saved), g)
        return None, None, None, None


def run_backward(losses: Tensor, into: list[Tensor] | None = None) -> None:
    """Add the gradients of the sum of the losses (B,) to the parameters' .grad, by way of their groups.

    Args:
        losses: of the last forward pass.
        into: tensors that alone get a gradient; None lets autograd find all.
    """
    losses.sum().backward(inputs=into)
