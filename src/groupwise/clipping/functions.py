"""The layers' side of clipping in autograd: forwards as usual, and backwards that hand gradients to a group's pass.

Where parameters are shards that become whole tensors only while their layer runs (FSDP2), no gate can hold on to them:
`DirectFunction` returns the gradients itself. That takes a norm which one layer knows, or two backward passes.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from groupwise.clipping.gate import GroupPass, Member, autocast, no_autocast
from groupwise.clipping.layouts import FIRST, Layout


class LayerFunction(torch.autograd.Function):
    """A layer's own forward and input gradient; its parameters' gradients go through the gate."""

    @staticmethod
    def forward(
        ctx: Any,
        group_pass: GroupPass,
        member: Member,
        layout: Layout,
        probe: Tensor,
        x: Tensor,
        *parameters: Tensor | None,
    ) -> Tensor:
        ctx.group_pass, ctx.member, ctx.layout = group_pass, member, layout
        with no_autocast(x.device.type):
            y, saved = member.rule.forward(x, *parameters)
        ctx.save_for_backward(*saved)
        return _changeable(y, (x, *saved))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, g: Tensor) -> Any:
        saved, rule = ctx.saved_tensors, ctx.member.rule
        with no_autocast(g.device.type):
            g = rule.arrange(saved, g)
            gx = rule.input_gradient(saved, g) if ctx.needs_input_grad[4] else None
            squares = ctx.group_pass.reported(ctx.group_pass.receive(ctx.member, ctx.layout, saved, g))
        return None, None, None, squares, gx, *[None] * (len(ctx.needs_input_grad) - 5)


def _changeable(y: Tensor, kept: tuple[Tensor | None, ...]) -> Tensor:
    """An output that may be changed in place, as a layer's own may: no view, and of nothing that backward needs."""
    if not y._is_view():
        return y
    memory = y.untyped_storage().data_ptr()
    if any(t is not None and t.untyped_storage().data_ptr() == memory for t in kept):
        return y.clone()
    return torch.ops.aten._unsafe_view(y, y.shape)


class CopiesFunction(torch.autograd.Function):
    """One copy of a parameter for each example, (B, *shape): the copies' gradients are the per-example gradients."""

    @staticmethod
    def forward(ctx: Any, group_pass: GroupPass, member: Member, probe: Tensor, parameter: Tensor) -> Tensor:
        ctx.group_pass, ctx.member, ctx.layout = group_pass, member, FIRST
        return parameter.unsqueeze(0).expand(group_pass.batch, *parameter.shape)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, g: Tensor) -> Any:
        with no_autocast(g.device.type):
            squares = ctx.group_pass.reported(ctx.group_pass.receive(ctx.member, ctx.layout, (), g))
        return None, None, squares, None


class LateFunction(torch.autograd.Function):
    """Zeros (B, T, p) to add to T products with one weight whose inputs come one after the other (recurrence).

    Their gradients, with the inputs that were noted by then, are those of one linear layer on a sequence.
    """

    @staticmethod
    def forward(
        ctx: Any,
        group_pass: GroupPass,
        member: Member,
        layout: Layout,
        probe: Tensor,
        inputs: dict[int, Tensor],
        zeros: Callable[[], Tensor],
    ) -> Tensor:
        ctx.group_pass, ctx.member, ctx.layout, ctx.inputs = group_pass, member, layout, inputs
        return zeros()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, g: Tensor) -> Any:
        with no_autocast(g.device.type):
            x = torch.stack([ctx.inputs[t] for t in range(g.shape[1])], dim=1)
            squares = ctx.group_pass.reported(ctx.group_pass.receive(ctx.member, ctx.layout, (x, None), g))
        return None, None, None, squares, None, None


class DirectFunction(torch.autograd.Function):
    """A layer's own forward and all its gradients: for parameters that only the layer itself ever sees whole."""

    @staticmethod
    def forward(
        ctx: Any, group_pass: GroupPass, member: Member, probe: Tensor, x: Tensor, *parameters: Tensor | None
    ) -> Tensor:
        ctx.group_pass, ctx.member = group_pass, member
        _, used = autocast(member.rule.autocast, x, list(parameters))  # in here, so that gradients stay float32
        with no_autocast(x.device.type):
            y, saved = member.rule.forward(x, *used)
        ctx.save_for_backward(*saved)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, g: Tensor) -> Any:
        saved, rule = ctx.saved_tensors, ctx.member.rule
        with no_autocast(g.device.type):
            g = rule.arrange(saved, g)
            gx = rule.input_gradient(saved, g) if ctx.needs_input_grad[3] else None
            squares, gradients = ctx.group_pass.return_gradients(ctx.member, saved, g)
        return None, None, squares, gx, *gradients
