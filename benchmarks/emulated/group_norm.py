"""Stands in for GroupNorm's kernels on the emulated device: operations that read and write as much, each one launch.

They have the arguments and results of `groupwise.clipping.rules.group_norm_kernels`, which needs a compiler for GPUs.
"""

import torch
from torch import Tensor

torch.library.define(
    "groupwise_emulated::group_norm",
    "(Tensor x, Tensor? weight, Tensor? bias, int groups) -> (Tensor, Tensor, Tensor)",
)
torch.library.define(
    "groupwise_emulated::group_norm_backward",
    "(Tensor x, Tensor g, Tensor? weight, Tensor mean, Tensor rstd) -> (Tensor, Tensor, Tensor)",
)
torch.library.define(
    "groupwise_emulated::group_norm_sums",
    "(Tensor x, Tensor g, Tensor? weight, Tensor mean, Tensor rstd) -> (Tensor, Tensor)",
)


@torch.library.register_fake("groupwise_emulated::group_norm")
def _(x: Tensor, weight: Tensor | None, bias: Tensor | None, groups: int) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(x), _of(x, groups), _of(x, groups)


@torch.library.register_fake("groupwise_emulated::group_norm_backward")
def _(x: Tensor, g: Tensor, weight: Tensor | None, mean: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(x), _of(x, x.shape[1]), _of(x, x.shape[1])


@torch.library.register_fake("groupwise_emulated::group_norm_sums")
def _(x: Tensor, g: Tensor, weight: Tensor | None, mean: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    return _of(x, x.shape[1]), _of(x, x.shape[1])


def _of(x: Tensor, values: int) -> Tensor:
    return x.new_empty(len(x), values, dtype=torch.float32)


def tile(x: Tensor, groups: int) -> tuple[int, int] | None:
    """Of the widths that the kernels take."""
    width, space = x.shape[1] // groups, x[0, 0].numel()
    return None if width & (width - 1) or x.dtype == torch.float64 else (space, width)


def forward(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, groups: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The output, mean and 1/deviation, all fakes."""
    return torch.ops.groupwise_emulated.group_norm(x, weight, bias, groups)  # type: ignore[no-any-return]


def backward(
    x: Tensor, g: Tensor, weight: Tensor | None, mean: Tensor, rstd: Tensor, needs_input: bool
) -> tuple[Tensor | None, Tensor, Tensor]:
    """Gradients for the input and per example, all fakes."""
    given = (x, g, weight, mean, rstd)
    if needs_input:
        return torch.ops.groupwise_emulated.group_norm_backward(*given)  # type: ignore[no-any-return]
    return None, *torch.ops.groupwise_emulated.group_norm_sums(*given)
