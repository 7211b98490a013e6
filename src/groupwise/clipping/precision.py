"""Prevents rounding from making a norm too small: accurate sums of squares, rounding bounds (slack), full float32.

On a CPU torch adds squares in float32 almost one by one: the norm of 1e7 entries comes out too small by a relative
1e-3, that of 1e8 equal entries by 6e-2. Here float32 sums have at most `BLOCK` terms, and blocks are added in float64.
The error relative to the norm is then:

| source | at most |
|---|---|
| sums of a block's squares, 8 or 16 at a time: (1 + `BLOCK`/8 + 8) roundings of 2⁻²⁴, on the square | 7.5e-7 |
| the root of a block's sum, rounded | 6e-8 |
| adding up blocks in float64, up to 1e8 entries | 1e-10 |

The square of an entry below 1.1e-19 underflows in float32. With 1e8 such entries the norm loses 1e-15, far less than
1e-10, the least norm from which factors are formed (`LEAST_SQUARE`). A product of two norms may lose more: see `floor`.

torch may also multiply float32 numbers with 10 bits of fraction (TF32, on by default for convolutions on a GPU), or
with 7 (bfloat16). A clipped sum would then differ from the gradients whose norms were computed, by up to 1e-3. So
backward passes run in full float32, whatever the program allows elsewhere.

The sum over the batch and its microbatches is not covered by this: each addition rounds by 2⁻²⁴ of the *sum*, so one
more example changes the rounding of the sum of all others. With 512 × 512 weights and 1024 examples in 16 microbatches
that is 3e-6·C, or 4e-5·C if all examples are equal.
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
"""The most squares that are added in the rows' own precision."""
LONGEST_SUM = 1024
"""The longest inner product in one call. A library may add its terms one by one: up to this length `rounding_slack`
covers the error of that, but not for a longer sum."""
LEAST_SQUARE = 1e-20
"""Clip factors are computed as if no squared norm were smaller than this. What underflows in float32 is far less."""


def squared_row_norms(rows: Tensor) -> Tensor:
    """‖row_i‖² of rows (B, ...) -> (B,), float64, from sums in at least float32; infinite above 1.8e19 in float32."""
    return row_lengths(rows).double().square_()


def row_lengths(rows: Tensor) -> Tensor:
    """‖row_i‖ of rows (B, ...) -> (B,), from sums in at least float32; in float64 for more than one block."""
    flat = rows.flatten(1) if rows.is_contiguous() and rows.dim() > 1 else in_memory_order(rows)[0]  # without a copy
    count, rest = divmod(flat.shape[1], BLOCK)
    wide = torch.promote_types(rows.dtype, torch.float32)  # the kernel converts half precision without a copy
    if not count:
        return torch.linalg.vector_norm(flat, dim=1, dtype=wide)
    blocks = flat[:, : count * BLOCK].unflatten(1, (count, BLOCK))
    lengths = torch.linalg.vector_norm(blocks, dim=2, dtype=wide)
    if rest:
        more = torch.linalg.vector_norm(flat[:, count * BLOCK :], dim=1, keepdim=True, dtype=wide)
        lengths = torch.cat([lengths, more], 1)
    return torch.linalg.vector_norm(lengths, dim=1, dtype=torch.float64)


def in_memory_order(rows: Tensor) -> tuple[Tensor, list[int]]:
    """Rows (B, *shape) as (B, m), a view if possible, with the entries in memory order; and that order of the axes."""
    order = list(range(1, rows.dim()))
    if not rows.is_contiguous():
        order.sort(key=rows.stride, reverse=True)
        rows = rows.permute(0, *order)
    return rows.unsqueeze(1) if rows.dim() == 1 else rows.flatten(1), order


def sum_of_squares(gradients: Sequence[Tensor | None]) -> Tensor:
    """‖g^(i)‖² over all parameters, (B,) float64, from per-example gradients (B, *shape) or None."""
    return torch.stack([squared_row_norms(rows) for rows in gradients if rows is not None]).sum(0)


def at_least_zero(squares: Tensor) -> Tensor:
    """Clamp differences of squared norms (n,) to at least 0. One is -inf if the subtracted part overflowed: it becomes
    inf, so that the example is left out."""
    return F.threshold(squares, -1e300, math.inf).clamp_min_(0)


def rounding_slack(absolute: Tensor, terms: int, dtype: torch.dtype | None = None) -> Tensor:
    """A bound on the rounding error of a sum of products whose absolute values add up to `absolute`.

    Squared norms from terms that cancel (Gram matrices, closed forms, cross terms) are raised by this much, so that no
    norm is too small. The bound is 4·√n·eps for inner products of n terms. It holds with high probability if rounding
    errors are independent (Higham and Mary 2019). If they are not (all terms equal), it holds by measurement, because
    `inner_products` adds up few terms at a time. If nothing cancels, it is a relative 1e-5 or less in float32.
    `dtype` is that of the sum, if it is not the dtype of `absolute`.
    """
    return absolute * slack_of(terms, dtype or absolute.dtype, absolute.device)


def slack_of(terms: int, dtype: torch.dtype, device: torch.device) -> float:
    """`rounding_slack`, relative to the sum of the absolute values.

    n equal terms that are added one by one have an error of n·eps/8, which is more than 4·√n·eps for long sums. So the
    slack is at least that of a sum of the longest part's length.
    """
    part = min(terms, longest_sum(device))
    return 4.0 * max(terms, part * part / LONGEST_SUM) ** 0.5 * torch.finfo(dtype).eps


def longest_sum(device: torch.device) -> int:
    """The longest inner product in one call; more on a GPU, where each part costs a kernel."""
    return LONGEST_SUM if device.type == "cpu" else 4 * LONGEST_SUM


def second_product_slack(x: Tensor, g: Tensor, terms: int) -> Tensor:
    """The slack of norms, (B,), if the clipped sum is computed by another product than the norms.

    x and g (B, ...) are the factors of one example's gradient, a sum of n = `terms` outer products. The two products
    round differently, by up to 4·√n·eps·‖x‖‖g‖, or, if many terms are equal (a blank image), n·eps/8·‖x‖‖g‖.
    """
    wide = torch.promote_types(g.dtype, torch.float32)
    left, right = (torch.linalg.vector_norm(t.flatten(1), dim=1, dtype=wide).double() for t in (x, g))
    return left * right * (4.0 * max(terms, terms**2 / LONGEST_SUM) ** 0.5 * torch.finfo(wide).eps)


def inflate_norms(squares: Tensor, slack: Tensor) -> Tensor:
    """Raise norms a by their slack b: squared norms a² (B,) -> (a + b)² (B,)."""
    return (squares.sqrt() + slack).square_()


def upcast(t: Tensor) -> Tensor:
    """Convert half precision to float32, so that norms and sums are float32 or better."""
    return t.float() if t.dtype in (torch.float16, torch.bfloat16) else t


def keeps_half(*tensors: Tensor) -> bool:
    """Whether to multiply without conversion: all are bfloat16 on a GPU, where products are exact in float32."""
    return all(t.dtype == torch.bfloat16 and t.device.type != "cpu" for t in tensors)


def batched_product(a: Tensor, b: Tensor) -> Tensor:
    """AB (B, n, m) of a (B, n, k) and b (B, k, m), added up in at least float32."""
    if keeps_half(a, b) and a.device.type != "cpu":
        return torch.bmm(a, b, out_dtype=torch.float32)
    return batched(upcast(a), upcast(b))


def product_over_rows(a: Tensor, b: Tensor) -> Tensor:
    """AᵀB (n, m) of a (k, n) and b (k, m), added up in at least float32.

    One of them is bfloat16. The other is bfloat16 too, or bfloat16 numbers times factors from `cut_factors`: these
    products have 16 bits, so they split into two bfloat16 matrices without loss.
    """
    pairs = [(x.t(), y) for x in _halves(a) for y in _halves(b)]
    on_cpu = a.device.type == "cpu"
    products = [x.float() @ y.float() if on_cpu else torch.mm(x, y, out_dtype=torch.float32) for x, y in pairs]
    return products[0] if len(products) == 1 else products[0].add_(products[1])


def _halves(t: Tensor) -> tuple[Tensor, ...]:
    if keeps_half(t):
        return (t,)
    high = t.bfloat16()
    return high, (t - high).bfloat16()


def cut_factors(factors: Tensor) -> Tensor:
    """Truncate factors (B,), float32, to the 8 bits of bfloat16: smaller by at most a relative 2⁻⁷; 1 stays 1."""
    return (factors.float().view(torch.int32) & -65536).view(torch.float32)


def floor(numbers: int, dtype: torch.dtype) -> float:
    """An upper bound on the squared norm of so many entries whose squares have all underflowed."""
    return numbers * float(torch.finfo(dtype).tiny)


@contextmanager
def full_float32() -> Iterator[None]:
    """Inside, float32 products and convolutions use full precision; the settings are restored afterwards.

    The settings are global to the process, so they also hold in autograd's threads.
    """
    matmul: Any = torch.backends.cuda.matmul
    with with_tf32(False) as settings:
        for setting in settings:
            setting.fp32_precision = "ieee"
        partial_sums = matmul.allow_bf16_reduced_precision_reduction
        matmul.allow_bf16_reduced_precision_reduction = False  # else parts of a sum may be added up in bfloat16
        try:
            yield
        finally:
            matmul.allow_bf16_reduced_precision_reduction = partial_sums


@contextmanager
def with_tf32(allowed: bool) -> Iterator[tuple[Any, ...]]:
    """Inside, float32 products and convolutions on a GPU may use TF32, or may not.

    Yields torch's settings with an ``fp32_precision``, all of which are restored afterwards. torch also has an older
    setting, ``allow_tf32``, and raises errors where the two disagree. Setting the older one sets the newer ones too.
    """
    on: Any = torch.backends
    gpu = (on.cuda.matmul, on.cudnn) if torch.cuda.is_available() else ()
    settings = (on.cuda.matmul, on.cudnn.conv, on.cudnn.rnn, on.mkldnn.matmul, on.mkldnn.conv)
    precisions = [setting.fp32_precision for setting in settings]
    before = [_allows_tf32(backend) for backend in gpu]
    try:
        for backend in gpu:
            backend.allow_tf32 = allowed
        yield settings
    finally:
        for backend, value in zip(gpu, before, strict=True):
            backend.allow_tf32 = value
        for setting, precision in zip(settings, precisions, strict=True):
            setting.fp32_precision = precision


def _allows_tf32(backend: Any) -> bool:
    """The older setting of a backend. torch does not show it where the newer ones disagree with it."""
    try:
        return bool(backend.allow_tf32)
    except RuntimeError:
        newer = (backend.conv, backend.rnn) if backend is torch.backends.cudnn else (backend,)
        return any(setting.fp32_precision != "tf32" for setting in newer)


def no_autocast(device: str) -> AbstractContextManager[object]:
    """Disable autocast, as rules choose their own precision. Does nothing if it is off, as entering it takes time."""
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()


def refuse_float16(label: str, device: str) -> None:
    """Raise a `UserError` under autocast to float16. Small gradients would be 0, and loss scaling would scale norms."""
    if torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) == torch.float16:
        raise UserError(
            f"{label} runs under autocast to float16, in which small gradients become 0 and large ones infinite: give "
            "torch.autocast torch.bfloat16, or leave it out."
        )


def autocast(kind: str, x: Tensor, parameters: list[Tensor | None]) -> tuple[Tensor, list[Tensor | None]]:
    """Cast a layer's inputs as autocast would, so that its rule can run without autocast; float64 is kept."""
    device = x.device.type
    if kind == "keep" or not torch.is_autocast_enabled(device) or x.dtype == torch.float64:
        return x, parameters
    dtype = torch.get_autocast_dtype(device) if kind == "lower" else torch.float32
    return x.to(dtype), [None if p is None else p.detach().to(dtype) for p in parameters]
