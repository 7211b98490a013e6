"""Puts clipping inside autograd: layers report squared norms, and their group adds clipped sums to .grad.

A group's `GroupFunction` runs just before the group's first layer and gives all its layers a probe, a (B,) zero vector.
So its backward runs after the backward of all these layers, when each has reported its squared norms. It then closes
the group: it forms the norms, the clip factors and the clipped sums, and adds the sums to .grad. Several groups may
close together. The parameters themselves are not in the graph. So if autograd finds a gradient for a parameter, that
gradient has bypassed its group, and is refused.

A sharded parameter (FSDP2) is a whole tensor only while its layer runs, so a group cannot add to it later. Such
parameters are in the graph, and their layer itself returns the clipped sums to autograd. The layer must then know the
norm: either it is a group by itself, or there are two backward passes.
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
    """Register a layer's call with its group in this pass. A recomputed call (checkpointing) joins the same group pass.

    Groups that close together get their probes (B,) when the first of their layers runs.

    Returns:
        A callback for the call's activations and output gradients; and the group's probe, None once it has closed.
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
    """Maps the anchors of groups that close together to one probe each, B zeros.

    Its backward runs when all layers of these groups have reported, and closes the groups.
    """

    @staticmethod
    def forward(ctx: Any, passes: list[GroupPass], *anchors: Tensor) -> tuple[Tensor, ...]:
        ctx.passes = passes
        ctx.set_materialize_grads(False)  # layers report to their groups, so probes get no gradient
        return torch.zeros(len(passes), passes[0].microbatch.examples, device=anchors[0].device).unbind()

    @staticmethod
    def backward(ctx: Any, *_: Tensor | None) -> Any:
        close(ctx.passes)
        return (None,) * (1 + len(ctx.passes))


class LayerFunction(torch.autograd.Function):
    """A layer's forward and input gradient; its group computes the gradients of its parameters.

    Parameters are passed in a list, because autograd does not track tensors in lists. Sharded parameters are passed
    as separate arguments, and get their gradients from here.
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
            _, parameters = autocast(rule.autocast, x, list(shards))  # cast here, so that gradients stay float32
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
    """Make an output that is a view safe to change in place: copy it if backward needs the same memory."""
    memory = y.untyped_storage().data_ptr()
    if any(t is not None and t.untyped_storage().data_ptr() == memory for t in kept):
        return y.clone()
    return torch.ops.aten._unsafe_view(y, y.shape)


class ReportFunction(torch.autograd.Function):
    """Puts a tensor into the graph, and reports its gradient to a layer of the group as that layer's output gradient.

    The tensor may be copies of a parameter, one per example: their gradients are the per-example gradients. Or it may
    be zeros (B, T, p) that are added to the T products of a recurrent weight: their gradients, together with the T
    inputs (B, T, d), are those of one linear layer on a sequence.
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
    """Run backward from the sum of the losses (B,); the groups add the clipped sums to .grad.

    Args:
        losses: of the last forward pass.
        into: the only tensors for which autograd computes gradients; None: all leaves.
    """
    losses.sum().backward(inputs=into)
