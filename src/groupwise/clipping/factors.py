"""Turns per-example norms and thresholds into clip factors, and defines the sensitivity of the clipped sums."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from groupwise.clipping.precision import in_memory_order

ClipRule = Callable[[Tensor, Tensor], Tensor]
"""(norms (K, B), thresholds (K, 1)) -> factors (K, B), each a function of its own norm, factor · norm <= threshold."""


def clip_factors(norms: Tensor, threshold: Tensor) -> Tensor:
    """min(1, C_k / ‖g_k‖): scales gradients longer than the threshold down to it (Algorithm 1, line 9).

    Args:
        norms: per-example gradient norms ‖g_k^(i)‖, (K, B), non-negative.
        threshold: C_k > 0, (K, 1), or a scalar tensor.

    Returns:
        Factors (K, B) in (0, 1].
    """
    return (threshold / norms).clamp_max(1.0)  # a norm of 0 gives 1, since C_k / 0 is infinite


def automatic_factors(gamma: float) -> ClipRule:
    """C_k / (‖g_k‖ + γ): every gradient is rescaled to just under the threshold (Bu et al. 2023).

    Args:
        gamma: stability constant γ > 0; smaller γ means closer to plain normalisation.
    """
    if not gamma > 0:
        raise ValueError(f"automatic clipping needs gamma > 0; {gamma} was given.")

    return lambda norms, threshold: threshold / (norms + gamma)


CLIP_RULES: dict[str, Callable[[float], ClipRule]] = {
    "min": lambda gamma: clip_factors,
    "automatic": automatic_factors,
}
"""The rule that each `clip.rule=` names, made from `clip.gamma`."""


def keep_finite(factors: Tensor, squared_norms: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Set the factor of every example whose squared norm is not finite in `dtype` (by default its own) to exactly 0, so
    that the example is left out of the sum."""
    finite = squared_norms.to(dtype or squared_norms.dtype).abs() < math.inf  # for NaN the comparison is False
    return torch.where(finite, factors, 0.0)


def is_async_device(t: Tensor) -> bool:
    """Whether the tensor is on a device (a GPU) where reading a value synchronises and every operation is a kernel."""
    return t.device.type != "cpu"


class Factors(NamedTuple):
    """The clip factors of n examples."""

    values: Tensor
    """(n,); 0 for an example that is left out because its norm is not finite."""
    dropped: Tensor | None
    """(n,) booleans: examples to set to zero in every tensor, since 0 · NaN is NaN. None if there is none, or if rows
    are not masked."""

    @classmethod
    def of(cls, values: Tensor, masks: bool = True) -> "Factors":
        """From values (n,) or (K, n).

        On a CPU this looks whether any example is dropped; usually none is. On a GPU that would synchronise, so either
        all rows are masked or none (`ClippingEngine.masks_rows`).
        """
        drops = masks if is_async_device(values) else not bool(values.all())
        return cls(values, values == 0 if drops else None)


def without_rows(rows: Tensor, dropped: Tensor | None) -> Tensor:
    """Rows (B, ...) with those of dropped examples (B,) set to zero, even if they hold NaN."""
    return rows if dropped is None else rows.masked_fill(dropped.view(-1, *[1] * (rows.dim() - 1)), 0)


def scale_rows(rows: Tensor, factors: Tensor | None) -> Tensor:
    """rows_i · factor_i for rows (B, ...); ``None`` returns the rows unchanged."""
    return rows if factors is None else rows * factors.to(rows.dtype).view(-1, *[1] * (rows.dim() - 1))


def add_weighed_rows(total: Tensor | None, factors: Factors, rows: Tensor) -> Tensor:
    """total + Σ_i factor_i · rows_i, added in place if a total is given."""
    weights, dropped = factors.values.to(rows.dtype), factors.dropped
    flat, order = in_memory_order(rows)
    shape = [rows.shape[axis] for axis in order]
    if total is not None and (known := total.permute([axis - 1 for axis in order])).is_contiguous():
        known.view(1, -1).addmm_(weights.unsqueeze(0), without_rows(flat, dropped))
        return total
    more = (weights @ without_rows(flat, dropped)).view(shape).permute(sorted(range(len(order)), key=order.__getitem__))
    return more if total is None else total.add_(more)


@dataclass(frozen=True)
class Sensitivity:
    """The ℓ2 sensitivity of the clipped sums of a logical batch, which the noise is scaled to.

    Formal guarantee: for two batches that are neighbours in `relation`, the sums in the .grad of group k's parameters
    differ by at most `thresholds[k]` in ℓ2, jointly over the group. An example is in one microbatch of one replica, so
    the same holds for the sum over all microbatches and replicas.
    """

    relation: str
    groups: tuple[tuple[nn.Parameter, ...], ...]
    """The parameters of each group, K tuples."""
    thresholds: Tensor
    """C_k, (K,) float64 on the CPU: the largest that clipped in any backward pass of the batch."""
