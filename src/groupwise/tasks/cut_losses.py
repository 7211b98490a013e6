"""Computes cross-entropy from logits that are cut by the vocabulary, without any process ever having all of them.

For logits x (n, V) and labels y, loss = log Σ_v exp(x_v - m) + m - x_y with m = max_v x_v: what is summed or maximised
over the vocabulary is so over processes, by three numbers a token (Shoeybi et al., 2019, section 3).
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor


def cut_losses(logits: DTensor, labels: Tensor, ignored: int) -> Tensor:
    """Cross-entropy of each token, 0 where the label is `ignored`: (n, V) cut along V, (n,) -> (n,).

    All processes of the tensor's mesh call it at once, and all get all losses.
    """
    sizes: Any = logits.device_mesh
    step = -(-logits.shape[-1] // sizes.size())
    first = step * sizes.get_local_rank()
    return _Losses.apply(logits.to_local(), labels, ignored, first, sizes.get_group())  # type: ignore[no-any-return]


class _Losses(torch.autograd.Function):
    """The losses; their gradient for the part of the logits that is here is softmax less one-hot."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, labels: Tensor, ignored: int, first: int, group: dist.ProcessGroup) -> Tensor:
        most = x.amax(1)
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=group)
        weights = (x - most.unsqueeze(1)).exp_()
        own = labels - first
        here = (own >= 0) & (own < x.shape[1])
        own = own.masked_fill(~here, 0)
        target = x.gather(1, own.unsqueeze(1)).squeeze(1) - most
        sums = torch.stack([weights.sum(1), target.masked_fill(~here, 0)])
        dist.all_reduce(sums, group=group)
        counts = labels != ignored
        ctx.save_for_backward(weights, sums[0], own, here, counts)
        return (sums[0].log() - sums[1]).masked_fill_(~counts, 0)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, g: Tensor) -> Any:
        weights, total, own, here, counts = ctx.saved_tensors
        g = g.masked_fill(~counts, 0)
        gx = weights * (g / total).unsqueeze(1)
        gx.scatter_add_(1, own.unsqueeze(1), -(g * here).unsqueeze(1))
        return gx, None, None, None, None
