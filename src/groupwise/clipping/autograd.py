"""Puts clipping inside autograd: layers report squared norms, and their group adds clipped sums to .grad.

A group's `GroupFunction` runs just before the group's first layer and gives a probe, B zeros, to all its layers. So its
backward runs once the backward pass has left the first layer, when every layer has reported its squared norms. It then
closes the group (norms, factors and sums, at once for groups that close together) and adds the clipped sums to the
parameters' gradients. The parameters themselves are no part of the graph, so that a gradient which autograd finds for
one bypasses its group, and is refused.

Where parameters are shards that become whole tensors only while their layer runs (FSDP2), a group has nothing whole to
add to: `DirectFunction` returns a layer's gradients itself. That takes a norm which one layer knows, or two backward
passes.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointError

from groupwise.clipping.groups import ClippedLayer, clip_factors_of
from groupwise.clipping.layouts import FIRST, Layout
from groupwise.clipping.microbatches import GroupPass
from groupwise.clipping.norm_terms import RowTerms, joined_sums, squares_together
from groupwise.clipping.phases import Phase
from groupwise.clipping.precision import autocast, no_autocast
from groupwise.clipping.rules.base import add_up
from groupwise.clipping.shared_parameters import LayerCall
from groupwise.errors import UserError

Backward = TypeVar("Backward", bound=Callable[..., Any])


def once(backward: Backward) -> Backward:
    """A backward pass that has none of its own; `once_differentiable` says so too, at the cost of a small kernel."""

    @wraps(backward)
    def refusing(*args: Any) -> Any:
        if torch.is_grad_enabled():
            raise UserError(
                "Clipped gradients have no derivative: run the backward pass without create_graph=True. Losses with "
                "derivatives of the model by its input (PINN, gradient penalty, score matching) are not supported; "
                "with finite differences they are."
            )
        return backward(*args)

    return refusing  # type: ignore[return-value]


def probe_of(group_pass: GroupPass, device: torch.device) -> Tensor | None:
    """The probe (B,) of a group's pass, made when it is first asked for; None when the pass is over."""
    if group_pass.probe is None and not group_pass.over:
        passes = group_pass.passes_together()
        anchors = [each.group.anchor for each in passes]
        for each, probe in zip(passes, GroupFunction.apply(passes, device, *anchors), strict=True):
            each.probe = probe
    return group_pass.probe


class GroupFunction(torch.autograd.Function):
    """From the anchors of groups that close together to a probe each, B zeros.

    Its backward runs when the layers of all of them have reported; it closes the groups.
    """

    @staticmethod
    def forward(ctx: Any, passes: list[GroupPass], device: torch.device, *anchors: Tensor) -> tuple[Tensor, ...]:
        ctx.passes = passes
        ctx.set_materialize_grads(False)  # layers report to their groups, so that probes have none
        return torch.zeros(len(passes), passes[0].batch, device=device).unbind()

    @staticmethod
    @once
    def backward(ctx: Any, *_: Tensor | None) -> Any:
        passes: list[GroupPass] = ctx.passes
        with no_autocast(passes[0].group.threshold.device.type):
            close(passes)
        return (None,) * (2 + len(passes))


def close(passes: Sequence[GroupPass]) -> None:
    """The layers of groups that close together have reported: form factors, and add the clipped sums to .grad.

    Raises:
        UserError: see `GroupPass.begin_closing`.
    """
    there = [each for each in passes if each.begin_closing()]
    current = there[0].running if there else None
    if current is not None and current.phase in (Phase.NORMS, Phase.CLIP):
        waiting = [each for each in there if not each.done]
        squares = total_squares(waiting)
        if current.phase is Phase.CLIP:
            _add_sums(waiting, squares)
        current.squared_norms |= {each.group.index: rows for each, rows in zip(waiting, squares, strict=True)}
        current.squared_norms |= {each.group.index: _joined(each.squares) for each in there if each.done}
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


def _add_sums(passes: Sequence[GroupPass], squares: list[Tensor]) -> None:
    """Factors from the norms, and with them the sums that are due."""
    if not passes:
        return
    factors = clip_factors_of([each.group for each in passes], squares)
    joined: dict[int, list[tuple[GroupPass, ClippedLayer, RowTerms, Tensor]]] = {}
    for each, weights in zip(passes, factors, strict=True):
        embeddings: list[LayerCall] = []
        while each.due:  # what a layer kept is freed as soon as its sum is made
            member, due = each.due.pop(0)
            if isinstance(due, RowTerms) and due.joined is not None:
                joined.setdefault(id(due.joined[0]), []).append((each, member, due, weights))
            elif isinstance(due, RowTerms):
                each.add(member, add_up([(weights, due.gradients)]))
            elif due.rule.indexed:
                embeddings.append(due)
            else:
                each.add_weighted(due, weights)
        for call in embeddings:  # they need not be made whole where the parameter has a sum already
            each.add_weighted(call, weights)
    for some in joined.values():
        sums = joined_sums([rows for _, _, rows, _ in some], [weights for _, _, _, weights in some])
        for (each, member, _, _), total in zip(some, sums, strict=True):
            each.add(member, total)


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


class LayerFunction(torch.autograd.Function):
    """A layer's own forward and input gradient; its parameters' gradients come from its group.

    Parameters come in a list, in which autograd does not look for inputs: they get no gradient from here.
    """

    @staticmethod
    def forward(
        ctx: Any,
        group_pass: GroupPass,
        member: ClippedLayer,
        layout: Layout,
        parameters: list[Tensor | None],
        probe: Tensor,
        x: Tensor,
    ) -> Tensor:
        ctx.group_pass, ctx.member, ctx.layout = group_pass, member, layout
        with no_autocast(x.device.type):
            y, saved = member.rule.forward(x, *parameters)
        ctx.save_for_backward(*saved)
        return _changeable(y, (x, *saved)) if y._is_view() else y

    @staticmethod
    @once
    def backward(ctx: Any, g: Tensor) -> Any:
        saved, rule = ctx.saved_tensors, ctx.member.rule
        with no_autocast(g.device.type):
            g = rule.arrange(saved, g)
            gx, saved = rule.begin_backward(saved, g, ctx.needs_input_grad[5])
            ctx.group_pass.receive(ctx.member, ctx.layout, saved, g)
        return None, None, None, None, None, gx


def _changeable(y: Tensor, kept: tuple[Tensor | None, ...]) -> Tensor:
    """A view as an output that may be changed in place, as a layer's own may: of nothing that backward needs."""
    memory = y.untyped_storage().data_ptr()
    if any(t is not None and t.untyped_storage().data_ptr() == memory for t in kept):
        return y.clone()
    return torch.ops.aten._unsafe_view(y, y.shape)


class CopiesFunction(torch.autograd.Function):
    """One copy of a parameter for each example, (B, *shape): the copies' gradients are the per-example gradients."""

    @staticmethod
    def forward(ctx: Any, group_pass: GroupPass, member: ClippedLayer, probe: Tensor, parameter: Tensor) -> Tensor:
        ctx.group_pass, ctx.member = group_pass, member
        return parameter.unsqueeze(0).expand(group_pass.batch, *parameter.shape)

    @staticmethod
    @once
    def backward(ctx: Any, g: Tensor) -> Any:
        with no_autocast(g.device.type):
            ctx.group_pass.receive(ctx.member, FIRST, (), g)
        return None, None, None, None


class LateFunction(torch.autograd.Function):
    """Zeros (B, T, p), as if added to T products with one weight whose inputs come one after the other (recurrence).

    Their gradients, with the inputs (B, T, d) that were noted by then, are those of one linear layer on a sequence.
    """

    @staticmethod
    def forward(
        ctx: Any,
        group_pass: GroupPass,
        member: ClippedLayer,
        layout: Layout,
        probe: Tensor,
        inputs: list[Tensor],
        zeros: Tensor,
    ) -> Tensor:
        ctx.group_pass, ctx.member, ctx.layout, ctx.inputs = group_pass, member, layout, inputs
        return zeros

    @staticmethod
    @once
    def backward(ctx: Any, g: Tensor) -> Any:
        with no_autocast(g.device.type):
            [x] = ctx.inputs
            ctx.group_pass.receive(ctx.member, ctx.layout, (x, None), g)
        return None, None, None, None, None, None


class DirectFunction(torch.autograd.Function):
    """A layer's own forward and all its gradients: for parameters that only the layer itself ever sees whole."""

    @staticmethod
    def forward(
        ctx: Any, group_pass: GroupPass, member: ClippedLayer, probe: Tensor, x: Tensor, *parameters: Tensor | None
    ) -> Tensor:
        ctx.group_pass, ctx.member = group_pass, member
        _, used = autocast(member.rule.autocast, x, list(parameters))  # in here, so that gradients stay float32
        with no_autocast(x.device.type):
            y, saved = member.rule.forward(x, *used)
        ctx.save_for_backward(*saved)
        return y

    @staticmethod
    @once
    def backward(ctx: Any, g: Tensor) -> Any:
        saved, rule = ctx.saved_tensors, ctx.member.rule
        with no_autocast(g.device.type):
            g = rule.arrange(saved, g)
            gx, saved = rule.begin_backward(saved, g, ctx.needs_input_grad[3])
            gradients = ctx.group_pass.return_gradients(ctx.member, saved, g)
        return None, None, None, gx, *gradients


def run_backward(losses: Tensor, into: list[Tensor] | None = None) -> None:
    """Add the gradients of the sum of the losses (B,) to the parameters' .grad, by way of their groups.

    Args:
        losses: of the last forward pass.
        into: tensors that alone get a gradient; None lets autograd find all.

    Raises:
        UserError: a kept tensor was changed in place; a checkpoint that does not compute the same again.
    """
    with in_one_sentence(), no_autocast(losses.device.type):  # gradients in the precision in which they were attached
        losses.sum().backward(inputs=into)


def run_norms(losses: Tensor, probe: Tensor) -> None:
    """Let the layers of a group report the norms of the losses (B,); the graph stays for a second pass.

    Raises:
        UserError: as `run_backward`.
    """
    with in_one_sentence(), no_autocast(losses.device.type):
        torch.autograd.grad(losses.sum(), probe, retain_graph=True, allow_unused=True)


@contextmanager
def in_one_sentence() -> Iterator[None]:
    """What autograd says of tensors that were changed, and checkpointing of what changed, becomes a `UserError`."""
    try:
        yield
    except RuntimeError as error:
        first = str(error).splitlines()[0]
        if isinstance(error, CheckpointError):
            raise UserError(
                "Activation checkpointing did not compute the same tensors again: what it runs must not depend on what "
                f"changes between forward and backward pass. torch says: {first}"
            ) from error
        if "modified by an inplace operation" in str(error):
            raise UserError(
                "A tensor that a layer keeps for its backward pass was changed in place: use operations that are not. "
                f"torch says: {first}"
            ) from error
        raise
