"""Computes GroupNorm in channels_last on a GPU, one kernel each way, with weight gradients for each example.

Torch's kernel takes contiguous tensors only, and plain formulas pass over the activations about ten times. Here a
program holds the positions of some groups of one example in registers: the forward pass reads x and writes y, the
backward pass reads x and the output gradient and writes the input gradient, and with it Σ g∘x̂ and Σ g of each channel.

The kernels are Triton's, which comes with torch for CUDA; this file is imported where that is there, and no other file
knows of it. ``TRITON_INTERPRET=1`` runs them on a CPU. No GPU has run them yet: `group_norm.py` compares them with the
plain formulas before it uses them.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

SECTOR = 32
"""Bytes that memory is read in."""
MOST, FEW = 1 << 14, 1 << 13
"""Numbers of a tensor that a program holds at most, and up to which it takes more channels than it must. The backward
pass holds two tensors, in registers."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def tile(x: Tensor, groups: int) -> tuple[int, int] | None:
    """Positions (a power of two) and channels that a program takes of x (B, C, H, W), or None where they are too many.

    The channels are those of whole groups, a power of two each, and at least a sector wide where the tensor is.
    """
    _, c, h, w = x.shape
    width, positions = c // groups, triton.next_power_of_2(h * w)
    if not x.numel() or x.dtype not in DTYPES or width & (width - 1) or positions * width > MOST:
        return None
    channels = width
    while channels * x.element_size() < SECTOR and c % (2 * channels) == 0 and 2 * positions * channels <= FEW:
        channels *= 2
    return positions, channels


def forward(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, groups: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The output, like x (B, C, H, W) in channels_last, mean and 1/deviation (B, groups), in float32."""
    b, c, h, w = x.shape
    positions, channels = _tile(x, groups)
    weight, bias = _in_order(weight), _in_order(bias)
    y = torch.empty_like(x)
    mean, rstd = torch.empty(2, b, groups, dtype=torch.float32, device=x.device).unbind()
    with torch.cuda.device_of(x):
        _forward[(b, c // channels)](
            x, x if weight is None else weight, x if bias is None else bias, y, mean, rstd, h * w, c, eps,
            HAS_WEIGHT=weight is not None, HAS_BIAS=bias is not None,
            WIDTH=c // groups, POSITIONS=positions, CHANNELS=channels, num_warps=_warps(positions * channels),
        )  # fmt: skip
    return y, mean, rstd


def backward(
    x: Tensor, g: Tensor, weight: Tensor | None, mean: Tensor, rstd: Tensor, needs_input: bool
) -> tuple[Tensor | None, Tensor, Tensor]:
    """Gradients for x, and for each example's weight and bias, (B, C) float32.

    Args:
        x: the input, (B, C, H, W) in channels_last.
        g: the output's gradient, in the same format.
        weight: (C,), or None for ones.
        mean: of each group, (B, groups). rstd: 1/deviation, the same; both float32.
        needs_input: else the first is None.
    """
    b, c, h, w = x.shape
    positions, channels = _tile(x, mean.shape[1])
    weight, mean, rstd = _in_order(weight), mean.contiguous(), rstd.contiguous()
    gx = torch.empty_like(x) if needs_input else None
    weights, biases = torch.empty(2, b, c, dtype=torch.float32, device=x.device).unbind()
    with torch.cuda.device_of(x):
        _backward[(b, c // channels)](
            x, g, x if weight is None else weight, mean, rstd, x if gx is None else gx, weights, biases, h * w, c,
            HAS_WEIGHT=weight is not None, NEEDS_INPUT=needs_input,
            WIDTH=c // mean.shape[1], POSITIONS=positions, CHANNELS=channels, num_warps=_warps(positions * channels),
        )  # fmt: skip
    return gx, weights, biases


def _tile(x: Tensor, groups: int) -> tuple[int, int]:
    found = tile(x, groups)
    assert found is not None, "the caller asks `tile` first"
    return found


def _in_order(values: Tensor | None) -> Tensor | None:
    return None if values is None else values.contiguous()


def _warps(numbers: int) -> int:
    return 4 if numbers <= FEW // 2 else 8 if numbers <= FEW else 16


@triton.jit
def _spread(values, GROUPS: tl.constexpr, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """One value a group -> one a channel."""
    return tl.reshape(tl.broadcast_to(values[:, None], (GROUPS, WIDTH)), (GROUPS * WIDTH,))


@triton.jit
def _sum_of_groups(values, GROUPS: tl.constexpr, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """One value a channel -> their sum for each group."""
    return tl.sum(tl.reshape(values, (GROUPS, WIDTH)), 1)


@triton.jit
def _places(  # type: ignore[no-untyped-def]
    space, c, WIDTH: tl.constexpr, POSITIONS: tl.constexpr, CHANNELS: tl.constexpr
):
    """Of program (b, j): b, channels and groups, where its numbers lie, (POSITIONS, CHANNELS), which are there."""
    GROUPS: tl.constexpr = CHANNELS // WIDTH
    b = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    group = b * (c // WIDTH) + tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    position = tl.arange(0, POSITIONS)
    at = b * space * c + position[:, None] * c + channel[None, :]
    return b, channel, group, at, (position < space)[:, None]


@triton.jit
def _forward(  # type: ignore[no-untyped-def]
    x, weight, bias, y, means, rstds, space, c, eps,
    HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr,
    WIDTH: tl.constexpr, POSITIONS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Program (b, j): channels j · CHANNELS and on of example b, at all its `space` positions."""
    GROUPS: tl.constexpr = CHANNELS // WIDTH
    _, channel, group, at, there = _places(space, c, WIDTH, POSITIONS, CHANNELS)
    v = tl.load(x + at, mask=there, other=0.0).to(tl.float32)
    mean = _sum_of_groups(tl.sum(v, 0), GROUPS, WIDTH) / (space * WIDTH)
    v = tl.where(there, v - _spread(mean, GROUPS, WIDTH)[None, :], 0.0)
    largest = tl.max(tl.reshape(tl.max(tl.abs(v), 0), (GROUPS, WIDTH)), 1)
    unit = tl.where(largest > 1e15, largest, 1.0)  # whose square would not fit
    v /= _spread(unit, GROUPS, WIDTH)[None, :]
    variance = _sum_of_groups(tl.sum(v * v, 0), GROUPS, WIDTH) / (space * WIDTH)
    rstd = 1.0 / tl.sqrt(variance + eps / unit / unit)
    v *= _spread(rstd, GROUPS, WIDTH)[None, :]
    if HAS_WEIGHT:
        v *= tl.load(weight + channel).to(tl.float32)[None, :]
    if HAS_BIAS:
        v += tl.load(bias + channel).to(tl.float32)[None, :]
    tl.store(y + at, v.to(y.dtype.element_ty), mask=there)
    tl.store(means + group, mean)
    tl.store(rstds + group, rstd / unit)


@triton.jit
def _backward(  # type: ignore[no-untyped-def]
    x, g, weight, means, rstds, gx, weights, biases, space, c,
    HAS_WEIGHT: tl.constexpr, NEEDS_INPUT: tl.constexpr,
    WIDTH: tl.constexpr, POSITIONS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Program (b, j), as in `_forward`: rstd·(g∘w - mean(g∘w) - x̂·mean(g∘w∘x̂)), means over a group."""
    GROUPS: tl.constexpr = CHANNELS // WIDTH
    b, channel, group, at, there = _places(space, c, WIDTH, POSITIONS, CHANNELS)
    rstd = _spread(tl.load(rstds + group), GROUPS, WIDTH)
    mean = _spread(tl.load(means + group), GROUPS, WIDTH)
    v = tl.load(g + at, mask=there, other=0.0).to(tl.float32)
    normal = (tl.load(x + at, mask=there, other=0.0).to(tl.float32) - mean[None, :]) * rstd[None, :]
    along, level = tl.sum(v * normal, 0), tl.sum(v, 0)
    tl.store(weights + b * c + channel, along)
    tl.store(biases + b * c + channel, level)
    if NEEDS_INPUT:
        scale = rstd
        if HAS_WEIGHT:
            w = tl.load(weight + channel).to(tl.float32)
            along, level, scale = along * w, level * w, rstd * w
        along = _spread(_sum_of_groups(along, GROUPS, WIDTH), GROUPS, WIDTH) * rstd / (space * WIDTH)
        level = _spread(_sum_of_groups(level, GROUPS, WIDTH), GROUPS, WIDTH) * rstd / (space * WIDTH)
        v = v * scale[None, :] - normal * along[None, :] - level[None, :]
        tl.store(gx + at, v.to(gx.dtype.element_ty), mask=there)
