"""Joins the parts of cut layers: identity forth and a sum back, and the reverse (Shoeybi et al., 2019, section 3).

A layer that is cut by its outputs reads what all processes have, and each knows a part of the input's gradient: that is
summed on the way back. The next one is cut by its inputs, and its outputs are summed on the way forth. Between the two
nothing is sent. A sum is over processes, of the same example's numbers, so no example meets another.
"""

import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard


class _Copied(torch.autograd.Function):
    """x, of which every process has a copy; the gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, g: Tensor) -> Any:
        return _summed(g, ctx.group), None


class _Summed(torch.autograd.Function):
    """The sum over processes of what each has; they all have its gradient already."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        return _summed(x, group)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, g: Tensor) -> Any:
        return g, None


def _summed(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    total = x.detach().clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


class Conjugates:
    """Hooks around the layers of one model that join its parts.

    Args:
        mesh: of the processes that have the parts, in one dimension.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh, self.group = mesh, mesh.get_group()
        self._known: tuple[weakref.ref[Tensor], weakref.ref[Tensor]] | None = None

    def before_columns(self, module: nn.Module) -> None:
        """Around a layer that is cut by its outputs: the gradient of its input is summed."""
        module.register_forward_pre_hook(lambda _, args: (self._copied(args[0]), *args[1:]))

    def after_rows(self, module: nn.Module) -> None:
        """Around a layer that is cut by its inputs: its output is summed."""
        module.register_forward_hook(lambda _, __, y: _Summed.apply(y, self.group))

    def around_rows_of_a_table(self, module: nn.Embedding, first: int) -> None:
        """Around an embedding of the rows from `first` on: other indices give zeros, and the outputs are summed."""
        elsewhere: list[Tensor] = []

        def before(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            own = args[0] - first
            elsewhere[:] = [(own < 0) | (own >= module.num_embeddings)]
            return own.masked_fill(elsewhere[0], 0), *args[1:]

        def after(_: nn.Module, __: Any, y: Tensor) -> Tensor:
            return _Summed.apply(y.masked_fill(elsewhere.pop().unsqueeze(-1), 0), self.group)  # type: ignore[no-any-return]

        module.register_forward_pre_hook(before)
        module.register_forward_hook(after)

    def after_head(self, module: nn.Module, columns: int) -> None:
        """Around a head that is cut by its outputs, of which there are so many.

        They stay cut, as a DTensor, where gradients are on, for a loss that takes that (`cut_losses` of `tasks.text_task`); any other
        operation on them either knows how to work on parts or fails. Elsewhere every process gets all of them.
        """

        def after(_: nn.Module, __: Any, y: Tensor) -> Tensor:
            whole = torch.empty(*y.shape[:-1], columns, device="meta")
            last = [Shard(y.dim() - 1)]
            parts = DTensor.from_local(y, self.mesh, last, run_check=False, shape=whole.shape, stride=whole.stride())
            return parts if y.requires_grad else parts.full_tensor()

        module.register_forward_hook(after)

    def _copied(self, x: Tensor) -> Tensor:
        """The same copy for all layers that read one tensor, so that one sum serves them all."""
        if not (x.requires_grad and torch.is_grad_enabled()):
            return x
        if self._known is not None and self._known[0]() is x and (copy := self._known[1]()) is not None:
            return copy
        copy = _Copied.apply(x, self.group)
        assert copy is not None
        self._known = weakref.ref(x), weakref.ref(copy)
        return copy
