"""Keeps rounding from under-stating a norm: squares that are added up without loss, slack, and full float32.

On a CPU torch adds up squares in float32 almost one after the other: a norm of 1e7 entries comes out by 1e-3
too small, one of 1e8 equal entries by 6e-2. Here float32 sums have at most `BLOCK` terms, and blocks are added up in
float64. What may be lost, relative to the norm:

| from | at most |
|---|---|
| sums of a block's squares, 8 or 16 at a time: (1 + `BLOCK`/8 + 8) roundings of 2⁻²⁴, on the square | 7.5e-7 |
| the root of a block's sum, rounded | 6e-8 |
| adding up blocks in float64, up to 1e8 entries | 1e-10 |

An entry below 1.1e-19 has no square in float32. All of these together, 1e-15 at 1e8 entries, are far less than 1e-10,
the least norm that factors are formed from (`LEAST_SQUARE`). In a product of two norms they may be more: `floor`.

torch may also multiply float32 numbers with 10 bits of fraction (TF32, on by default for convolutions on a GPU), or
with 7 (bfloat16). A clipped sum would then not be what its norm was measured on, up to 1e-3 apart, so backward passes
run with full float32 whatever the program allows elsewhere.

In none of this is the sum over the batch, over microbatches too: each addition costs 2⁻²⁴ of the *sum*, so one more
example changes the rounding of the sum of all others. With 512 × 512 weights and 1024 examples in 16
microbatches that is 3e-6·C, 4e-5·C if all are the same.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from groupwise.clipping.matmul import batched
from groupwise.errors import UserError

BLOCK = 128
"""Most numbers whose squares are added up in the rows' own precision."""
LONGEST_SUM = 1024
"""Numbers of two rows that may be multiplied and added up in one go: a library may add them up one after the other,
which loses as much of so many as `rounding_slack` allows for, and more of a longer sum."""
LEAST_SQUARE = 1e-20
"""Squared norms below this count as this in clip factors: what has no square in float32 is far less."""


def squared_row_norms(rows: Tensor) -> Tensor:
    """‖row_i‖² of rows (B, ...) -> (B,), float64, from sums in float32 at least; infinite above 1.8e19 in float32."""
    return row_lengths(rows).double().square_()


def row_lengths(rows: Tensor) -> Tensor:
    """‖row_i‖ of rows (B, ...) -> (B,), from sums in float32 at least; in float64 where there is more than a block."""
    flat = rows.flatten(1) if rows.is_contiguous() and rows.dim() > 1 else in_memory_order(rows)[0]  # without a copy
    count, rest = divmod(flat.shape[1], BLOCK)
    wide = torch.promote_types(rows.dtype, torch.float32)  # a kernel reads half precision as that, without a copy
    if not count:
        return torch.linalg.vector_norm(flat, dim=1, dtype=wide)
    blocks = flat[:, : count * BLOCK].unflatten(1, (count, BLOCK))
    lengths = torch.linalg.vector_norm(blocks, dim=2, dtype=wide)
    if rest:
        more = torch.linalg.vector_norm(flat[:, count * BLOCK :], dim=1, keepdim=True, dtype=wide)
        lengths = torch.cat([lengths, more], 1)
    return torch.linalg.vector_norm(lengths, dim=1, dtype=torch.float64)


def in_memory_order(rows: Tensor) -> tuple[Tensor, list[int]]:
    """Rows (B, *shape) as (B, m), a view where memory allows, and the order of axes that it took."""
    order = list(range(1, rows.dim()))
    if not rows.is_contiguous():
        order.sort(key=rows.stride, reverse=True)
        rows = rows.permute(0, *order)
    return rows.unsqueeze(1) if rows.dim() == 1 else rows.flatten(1), order


def sum_of_squares(gradients: Sequence[Tensor | None]) -> Tensor:
    """‖g^(i)‖² over all parameters, (B,) float64, from per-example gradients (B, *shape); None where not wanted."""
    return torch.stack([squared_row_norms(rows) for rows in gradients if rows is not None]).sum(0)


def at_least_zero(squares: Tensor) -> Tensor:
    """Squared norms (n,) less what was removed, at least 0; infinite where that overflowed before the whole did, so
    that the example is left out."""
    return F.threshold(squares, -1e300, math.inf).clamp_min_(0)


def rounding_slack(absolute: Tensor, terms: int, dtype: torch.dtype | None = None) -> Tensor:
    """How far rounding may have pushed down a sum of products whose absolute values add up to `absolute`.

    Squared norms that come out of cancelling terms (Gram matrices, closed forms, cross terms) are raised by this much,
    so that no norm is under-stated: 4·√n·eps, for inner products of n terms, holds with high probability (Higham and
    Mary 2019) where roundings are independent, and, as `inner_products` adds up a few terms at a time, by measurement
    where they are not: all terms equal. Where nothing cancels it is a relative 1e-5 or less in float32.
    `dtype` is what the sum was computed in, if that is not the type of `absolute`.
    """
    return absolute * slack_of(terms, dtype or absolute.dtype, absolute.device)


def slack_of(terms: int, dtype: torch.dtype, device: torch.device) -> float:
    """The same, relative to the absolute values' sum.

    Equal terms, added up one after the other in parts of p, are off by n·eps/8 for n = p: more than 4·√n·eps for long
    parts, so n is at least that of a sum with so much slack.
    """
    part = min(terms, longest_sum(device))
    return 4.0 * max(terms, part * part / LONGEST_SUM) ** 0.5 * torch.finfo(dtype).eps


def longest_sum(device: torch.device) -> int:
    """Numbers of two rows that are multiplied and added up in one go; more on a GPU, where each part is a kernel."""
    return LONGEST_SUM if device.type == "cpu" else 4 * LONGEST_SUM


def second_product_slack(x: Tensor, g: Tensor, terms: int) -> Tensor:
    """What a norm is `raised` by, (B,), where the clipped sum is made by another product.

    x and g (B, ...) are the two sides of one example's gradient, a sum of `terms` outer products. The second product
    rounds otherwise than the first, by up to 4·√n·eps·‖x‖‖g‖, or, where all of many terms are alike (a blank image),
    n·eps/8 times that.
    """
    wide = torch.promote_types(g.dtype, torch.float32)
    left, right = (torch.linalg.vector_norm(t.flatten(1), dim=1, dtype=wide).double() for t in (x, g))
    return left * right * (4.0 * max(terms, terms**2 / LONGEST_SUM) ** 0.5 * torch.finfo(wide).eps)


def inflate_norms(squares: Tensor, slack: Tensor) -> Tensor:
    """(a + b)² (B,) of squared norms a² and slack b: a norm that is under-stated by at most b is no longer."""
    return (squares.sqrt() + slack).square_()


def upcast(t: Tensor) -> Tensor:
    """Half precision becomes float32; everything else stays: norms and sums are float32 or better."""
    return t.float() if t.dtype in (torch.float16, torch.bfloat16) else t


def keeps_half(*tensors: Tensor) -> bool:
    """Whether bfloat16 numbers may go into products as they are: two of them have an exact product in float32."""
    return all(t.dtype == torch.bfloat16 and t.device.type != "cpu" for t in tensors)


def batched_product(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    """AB (B, n, m) of a (B, n, k) and b (B, k, m), added up in float32 at least; into `out`, if it is given."""
    if not keeps_half(a, b) or a.device.type == "cpu":
        return batched(upcast(a), upcast(b), out)
    if out is None:
        return torch.bmm(a, b, out_dtype=torch.float32)
    return torch.bmm(a, b, out_dtype=torch.float32, out=out)


def product_over_rows(a: Tensor, b: Tensor) -> Tensor:
    """AᵀB (n, m) of a (k, n) and b (k, m), added up in float32 at least.

    One of them is bfloat16. The other is bfloat16 as well, or bfloat16 numbers times factors of `cut_factors`: those
    have 16 bits, which two bfloat16 matrices hold without loss.
    """
    products = [_half_product(x.t(), y) for x in _halves(a) for y in _halves(b)]
    return products[0] if len(products) == 1 else products[0].add_(products[1])


def _halves(t: Tensor) -> tuple[Tensor, ...]:
    if keeps_half(t):
        return (t,)
    high = t.bfloat16()
    return high, (t - high).bfloat16()


def _half_product(a: Tensor, b: Tensor) -> Tensor:
    return a.float() @ b.float() if a.device.type == "cpu" else torch.mm(a, b, out_dtype=torch.float32)


def cut_factors(factors: Tensor) -> Tensor:
    """Factors (B,), float32, cut to the 8 bits of a bfloat16 number: never larger, by 2⁻⁷ at most smaller; 1 stays."""
    return (factors.float().view(torch.int32) & -65536).view(torch.float32)


def floor(numbers: int, dtype: torch.dtype) -> float:
    """More than the squared norm of so many numbers whose squares have all underflowed."""
    return numbers * float(torch.finfo(dtype).tiny)


@contextmanager
def full_float32() -> Iterator[None]:
    """Inside, products and convolutions of float32 tensors keep all their bits; the settings are put back as they were.

    They are the process's own, so they hold in autograd's threads as well.
    """
    matmul: Any = torch.backends.cuda.matmul
    with kept_precisions() as settings:
        for setting in settings:
            setting.fp32_precision = "ieee"
        partial_sums = matmul.allow_bf16_reduced_precision_reduction
        matmul.allow_bf16_reduced_precision_reduction = False  # else parts of a sum may be added up in bfloat16
        try:
            yield
        finally:
            matmul.allow_bf16_reduced_precision_reduction = partial_sums


@contextmanager
def kept_precisions() -> Iterator[tuple[Any, ...]]:
    """Gives all that has an ``fp32_precision``; at the end each has again what it had."""
    on: Any = torch.backends
    settings = (on.cuda.matmul, on.cudnn.conv, on.cudnn.rnn, on.mkldnn.matmul, on.mkldnn.conv)
    before = [setting.fp32_precision for setting in settings]
    try:
        yield settings
    finally:
        for setting, precision in zip(settings, before, strict=True):
            setting.fp32_precision = precision


def no_autocast(device: str) -> AbstractContextManager[object]:
    """Rules choose their own precision; entering autocast costs microseconds a layer, so only where it is on."""
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()


def refuse_float16(label: str, device: str) -> None:
    """Refuse a layer under autocast to float16, whose small gradients are 0; scaled losses would scale norms too."""
    if torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) == torch.float16:
        raise UserError(
            f"{label} runs under autocast to float16, in which small gradients become 0 and large ones infinite: give "
            "torch.autocast torch.bfloat16, or leave it out."
        )


def autocast(kind: str, x: Tensor, parameters: list[Tensor | None]) -> tuple[Tensor, list[Tensor | None]]:
    """What autocast would do to a layer's inputs, so that the rule itself can run without it; float64 stays."""
    device = x.device.type
    if kind == "keep" or not torch.is_autocast_enabled(device) or x.dtype == torch.float64:
        return x, parameters
    dtype = torch.get_autocast_dtype(device) if kind == "lower" else torch.float32
    return x.to(dtype), [None if p is None else p.detach().to(dtype) for p in parameters]
