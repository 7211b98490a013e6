"""Turns per-example norms and a threshold into clip factors and counts, and says how far one example moves the sums."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from groupwise.clipping.precision import in_memory_order

ClipRule = Callable[[Tensor, Tensor], Tensor]
"""(norms (K, B), thresholds (K, 1)) -> factors (K, B), each of its own norm, with factor · norm <= threshold."""


def clip_factors(norms: Tensor, threshold: Tensor) -> Tensor:
    """min(1, C_k / ‖g_k‖): long gradients are shortened to the threshold, short ones kept (Algorithm 1, line 9).

    Args:
        norms: per-example gradient norms ‖g_k^(i)‖, (K, B), non-negative.
        threshold: C_k > 0, (K, 1), or a scalar tensor.

    Returns:
        Factors (K, B) in (0, 1].
    """
    return (threshold / norms).clamp_max(1.0)  # of a norm of 0 as well: C_k / 0 is infinite


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


def keep_finite(
    factors: Tensor, squared_norms: Tensor, dtype: torch.dtype | None = None, zero: Tensor | float = 0.0
) -> Tensor:
    """Set the factor of every example whose squared norm is not finite, as a number of `dtype` (by default its own), to
    exactly 0: it is left out of the sum. A `zero` that is on the device already saves a kernel."""
    dtype = dtype or squared_norms.dtype
    wider = torch.promote_types(squared_norms.dtype, dtype) != dtype
    limit = FIRST_INFINITE[dtype] if wider else math.inf
    return torch.where(squared_norms.abs() < limit, factors, zero)  # NaN is not


FIRST_INFINITE = {
    torch.float32: (2 - 2**-24) * 2.0**127,
    torch.float16: 65520.0,
    torch.bfloat16: (2 - 2**-8) * 2.0**127,
}
"""The least number that is infinite once it is rounded."""


def is_async_device(t: Tensor) -> bool:
    """Whether reading a value of it synchronises with a device, on which every operation is a kernel."""
    return t.device.type != "cpu"


class Factors(NamedTuple):
    """What the gradients of n examples are multiplied by."""

    values: Tensor
    """(n,); 0 for an example that is left out, because its norm is not finite."""
    dropped: Tensor | None
    """Examples whose rows become zeros, (n,) booleans, as 0 · NaN is NaN; None where there is none, or where rows are
    not masked."""

    @classmethod
    def of(cls, values: Tensor, masks: bool = True) -> "Factors":
        """From values (n,) or (K, n).

        On a CPU that nobody is dropped is the common case, and it is looked up. Elsewhere rows are masked without
        asking, so that the host never waits for the device, or not at all (`ClippingEngine.masks_rows`).
        """
        if is_async_device(values):
            return cls(values, values == 0 if masks else None)
        return cls(values, None if bool(values.all()) else values == 0)

    def unbind(self) -> "list[Factors]":
        """Each group's own (n,) of (K, n)."""
        rows = self.values.unbind()
        return list(map(Factors, rows, [None] * len(rows) if self.dropped is None else self.dropped.unbind()))


def without_rows(rows: Tensor, dropped: Tensor | None) -> Tensor:
    """Rows (B, ...) with zeros in the places of dropped examples (B,), whatever they hold."""
    return rows if dropped is None else rows.masked_fill(dropped.view(-1, *[1] * (rows.dim() - 1)), 0)


def scale_rows(rows: Tensor, factors: Tensor | None) -> Tensor:
    """rows_i · factor_i of rows (B, ...); ``None`` keeps the rows as they are."""
    return rows if factors is None else rows * factors.to(rows.dtype).view(-1, *[1] * (rows.dim() - 1))


def add_weighed_rows(total: Tensor | None, factors: Factors, rows: Tensor) -> Tensor:
    """total + Σ_i factor_i · rows_i, in place where there is a total."""
    weights, dropped = factors.values.to(rows.dtype), factors.dropped
    flat, order = in_memory_order(rows)
    shape = [rows.shape[axis] for axis in order]
    if total is not None and (known := total.permute([axis - 1 for axis in order])).is_contiguous():
        known.view(1, -1).addmm_(weights.unsqueeze(0), without_rows(flat, dropped))
        return total
    more = (weights @ without_rows(flat, dropped)).view(shape).permute(sorted(range(len(order)), key=order.__getitem__))
    return more if total is None else total.add_(more)


RELATIONS = ("add_remove",)
"""Pairs of data sets that a sensitivity is known for: one has an example more."""


@dataclass(frozen=True)
class Sensitivity:
    """How far one example moves the clipped sums of a logical batch; what the noise is scaled by.

    Formal guarantee: between two batches in `relation`, the sum in the .grad of group k's parameters differs by at most
    `thresholds[k]` in ℓ2, jointly over the group. An example is in one microbatch of one replica, so the same holds for
    the sum over all of them.
    """

    relation: str
    groups: tuple[tuple[nn.Parameter, ...], ...]
    """The parameters of each group, K tuples."""
    thresholds: Tensor
    """C_k, (K,) float64 on the CPU: the largest in force in any backward pass of the batch."""
