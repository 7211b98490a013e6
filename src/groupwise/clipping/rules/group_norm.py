"""Clips GroupNorm and InstanceNorm, which is a GroupNorm of one channel a group.

One example's weight gradient is Σ g∘x̂ and its bias gradient Σ g over all positions of a channel. Both come from
per-channel sums of g and g∘x, without the normalised input. A CPU forms them a few examples at a time, in a core's own
cache. On a GPU torch's kernel has them on its way to the input gradient; as it takes contiguous tensors only,
channels_last has kernels of its own (`group_norm_kernels.py`), where there is Triton.
"""

import math
import warnings
from functools import cache
from itertools import product
from types import ModuleType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.modules.instancenorm import _InstanceNorm

from groupwise.clipping.precision import upcast
from groupwise.clipping.rules.base import Gradients, LayerRule, Saved, Wanted, in_format_of, register_rule
from groupwise.errors import UserError

LARGEST_GRID = 65_535
"""Groups of all examples together that CUDA's backward kernel takes: a block each, on a grid's second axis."""
CHUNK_FLOATS = 1 << 18
"""Numbers in the buffer of `_channel_products`: it stays in a core's own cache."""


@register_rule
class GroupNormRule(LayerRule):
    """`nn.GroupNorm` on (B, C, ...): weight (C,), bias (C,)."""

    layer_type: ClassVar[type[nn.Module]] = nn.GroupNorm
    parameter_names: ClassVar[tuple[str, ...]] = ("weight", "bias")
    autocast: ClassVar = "float32"
    batched: ClassVar[tuple[int, ...]] = (0, 2, 3, 4, 5)
    module: Any  # a GroupNorm, or what is one with other names (`InstanceNormRule`)

    def _groups(self) -> int:
        return int(self.module.num_groups)

    def has_batch(self, axes: int) -> bool:
        return True

    def forward(self, x: Tensor, *parameters: Tensor | None) -> tuple[Tensor, Saved]:
        weight, bias = parameters
        if (kernels := self._kernels(x)) is not None:
            y, mean, rstd = kernels.forward(x, weight, bias, self._groups(), self.module.eps)
            return y, (x, weight, mean, rstd, None, None)
        last = _channels_last(x) or (x.dim() == 5 and x.is_contiguous(memory_format=torch.channels_last_3d))
        whole = x if last and not in_one_piece(x) else x.contiguous()
        y, mean, rstd = torch.native_group_norm(whole, weight, bias, *self._sizes(x), self.module.eps)
        return in_format_of(x, y) if last else y, (whole, weight, mean, rstd, None, None)

    def arrange(self, saved: Saved, g: Tensor) -> Tensor:
        assert saved[0] is not None
        return in_format_of(saved[0], g)

    def input_gradient(self, saved: Saved, g: Tensor) -> Tensor | None:
        return self.begin_backward(saved, g, True)[0]

    def begin_backward(self, saved: Saved, g: Tensor, needs_input: bool) -> tuple[Tensor | None, Saved]:
        x, weight, mean, rstd = saved[:4]
        assert x is not None and mean is not None and rstd is not None
        if not in_one_piece(x):
            backward = torch.ops.aten.native_group_norm_backward
            rest = mean, rstd, weight, *self._sizes(x), [True, False, False]
            return backward(g, x, *rest)[0] if needs_input else None, saved
        if (kernels := self._kernels(x)) is not None:
            gx, weights, biases = kernels.backward(x, g, weight, mean, rstd, needs_input)
        else:
            wide = upcast(x), upcast(g), None if weight is None else upcast(weight), upcast(mean), upcast(rstd)
            gx, weights, biases = self._backward_whole(*wide)
        return gx.to(x.dtype) if needs_input else None, (None, None, None, None, weights, biases)

    def per_example_gradients(self, saved: Saved, g: Tensor, wanted: Wanted) -> Gradients:
        if saved[0] is not None and in_one_piece(saved[0]):
            _, saved = self.begin_backward(saved, g, False)
        x, _, mean, rstd, weight, bias = saved
        if x is None:
            return weight if wanted[0] else None, bias if wanted[1] else None
        assert mean is not None and rstd is not None
        x, g = upcast(x), upcast(g)
        space = tuple(range(2, x.dim()))
        bias = g.sum(space) if space else g
        if not wanted[0]:
            return None, bias
        product = _channel_products(g, x) if space else g * x
        return self._weights(product, bias, mean, rstd), bias if wanted[1] else None

    def _sizes(self, x: Tensor) -> tuple[int, int, int, int]:
        return x.shape[0], x.shape[1], math.prod(x.shape[2:]), self._groups()

    def _weights(self, products: Tensor, biases: Tensor, mean: Tensor, rstd: Tensor) -> Tensor:
        """Σ g∘x̂ (B, C) from Σ g∘x and Σ g, (B, C) each, mean and 1/deviation (B, groups)."""
        grouped = (len(products), self._groups(), -1)
        centred = products.view(grouped) - biases.view(grouped) * mean.unsqueeze(-1)
        return (centred * rstd.unsqueeze(-1)).view(products.shape)

    # -- on a GPU -------------------------------------------------------------------------------------------------

    def _kernels(self, x: Tensor) -> ModuleType | None:
        """What computes x (B, C, H, W) in channels_last in one kernel, if anything does."""
        kernels = kernels_of(x.device) if _channels_last(x) else None
        return kernels if kernels is not None and kernels.tile(x, self._groups()) is not None else None

    def _backward_whole(
        self, x: Tensor, g: Tensor, weight: Tensor | None, mean: Tensor, rstd: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients for the input, and per example for weight and bias, (B, C) each, from one call of torch's kernel.

        It adds up weight gradients over its batch, so it is told of one example with the channels of all.
        """
        b, c, space, groups = self._sizes(x)
        scales = (x.new_ones(c) if weight is None else weight).expand(b, c)
        parts = []
        for some in torch.arange(b).split(max(1, LARGEST_GRID // groups)):
            here, n = slice(int(some[0]), int(some[-1]) + 1), len(some)
            rows = (1, n * c, space, n * groups, [True, True, True])
            sums = mean[here].reshape(1, -1), rstd[here].reshape(1, -1), scales[here].reshape(-1)
            parts.append(torch.ops.aten.native_group_norm_backward(g[here], x[here], *sums, *rows))
        gx, weights, biases = (torch.cat([part.flatten() for part in each]) for each in zip(*parts, strict=True))
        return gx.view(x.shape), weights.view(b, c), biases.view(b, c)


@register_rule
class InstanceNormRule(GroupNormRule):
    """`nn.InstanceNorm1d/2d/3d` with `affine=True` on (B, C, *space): weight (C,), bias (C,)."""

    layer_type: ClassVar[type[nn.Module]] = _InstanceNorm
    module: _InstanceNorm

    def _groups(self) -> int:
        return self.module.num_features

    def prepare(self, x: Tensor) -> Tensor:
        """The input as it is.

        Raises:
            UserError: an input without a batch, or with one number a channel, of which nothing is left.
        """
        if x.dim() != self.module._get_no_batch_dim() + 1 or x[0, 0].numel() == 1:
            raise UserError(
                f"{type(self.module).__name__} got an input of shape {tuple(x.shape)}: the batch must come first, then "
                "the channels, with more than one number in each."
            )
        return x


def in_one_piece(x: Tensor) -> bool:
    """Whether one kernel on all examples beats several on few: on a GPU, which no core's cache helps."""
    return x.device.type != "cpu"


@cache
def kernels_of(device: torch.device) -> ModuleType | None:
    """The kernels for a GPU, compiled when they are first asked for; None: torch's serve.

    They are used only if they agree with torch's on a few numbers, which no generator draws.
    """
    if device.type != "cuda" or not torch.cuda.is_available():
        return None
    try:
        from groupwise.clipping.rules import group_norm_kernels
    except ImportError:  # torch brings Triton where it is built for CUDA on Linux
        return None
    try:
        if agrees(group_norm_kernels, device):
            return group_norm_kernels
        reason = "they differ from torch's"
    except Exception as error:  # a compiler's, of whatever kind: torch's are as right
        reason = next(iter(str(error).splitlines()), type(error).__name__)
    warnings.warn(f"The kernels of GroupNorm are not used, so it takes longer: {reason}.", stacklevel=2)
    return None


SEEN = ((2, 32, 5, 7, 4), (1, 16, 32, 32, 1))
"""B, C, H, W and groups that kernels are compared on: uneven, and the most that a program holds."""


def agrees(kernels: ModuleType, device: torch.device) -> bool:
    """Whether kernels compute what torch's do, in float32 and bfloat16."""
    for (b, c, h, w, groups), (dtype, allowed) in product(SEEN, ((torch.float32, 1e-4), (torch.bfloat16, 0.02))):
        module = nn.GroupNorm(groups, c).to(device)
        plain = torch.arange(b * h * w * c, device=device).double()
        both = torch.stack([(plain * 0.7).sin(), (plain * 1.3 + 1).cos()]).to(dtype).view(2, b, h, w, c)
        x, g = (t.permute(0, 3, 1, 2) for t in both.unbind())
        weight, bias = ((plain[: 2 * c].cos() + 2).float().view(2, c)).unbind()
        whole, gradient = x.float().contiguous(), g.float().contiguous()
        y, mean, rstd = torch.native_group_norm(whole, weight, bias, b, c, h * w, groups, module.eps)
        expected = y, mean, rstd, *GroupNormRule(module)._backward_whole(whole, gradient, weight, mean, rstd)
        y, mean, rstd = kernels.forward(x, weight, bias, groups, module.eps)
        found = y, mean, rstd, *kernels.backward(x, g, weight, mean, rstd, True)
        for one, other in zip(found, expected, strict=True):
            most = allowed * float(other.abs().max())
            if one is None or not float((one.float() - other).abs().max()) <= most:  # also where one is no number
                return False
    return True


def _channels_last(x: Tensor) -> bool:
    return x.dim() == 4 and not x.is_contiguous() and x.is_contiguous(memory_format=torch.channels_last)


def _channel_products(g: Tensor, x: Tensor) -> Tensor:
    """Σ g∘x over space, (B, C), a few examples at a time: a product of full size would only be written to be read."""
    step = max(1, min(len(g), CHUNK_FLOATS // g[0].numel()))
    buffer = torch.empty_like(g[:step])
    space, sums = tuple(range(2, g.dim())), []
    for start in range(0, len(g), step):
        part = slice(start, start + step)
        sums.append(torch.mul(g[part], x[part], out=buffer[: len(g[part])]).sum(space))
    return torch.cat(sums)
