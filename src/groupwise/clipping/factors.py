"""Turns per-example norms and a threshold into clip factors, and weighs rows by them."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

ClipRule = Callable[[Tensor, Tensor], Tensor]
"""(norms (B,), threshold ()) -> factors (B,) with factor · norm <= threshold for every example."""


def clip_factors(norms: Tensor, threshold: Tensor) -> Tensor:
    """min(1, C_k / ‖g_k‖): long gradients are shortened to the threshold, short ones kept (Algorithm 1, line 9).

    Args:
        norms: per-example gradient norms ‖g_k^(i)‖, (B,), non-negative.
        threshold: C_k > 0, a scalar tensor.

    Returns:
        Factors (B,) in (0, 1].
    """
    return (threshold / norms.clamp_min(torch.finfo(norms.dtype).tiny)).clamp_max(1.0)


def automatic_factors(gamma: float) -> ClipRule:
    """C_k / (‖g_k‖ + γ): every gradient is rescaled to just under the threshold (Bu et al. 2023).

    Args:
        gamma: stability constant γ > 0; smaller γ means closer to plain normalisation.
    """
    if not gamma > 0:
        raise ValueError(f"automatic clipping needs gamma > 0; {gamma} was given.")

    def factors(norms: Tensor, threshold: Tensor) -> Tensor:
        return threshold / (norms + gamma)

    return factors


CLIP_RULES: dict[str, Callable[[float], ClipRule]] = {
    "min": lambda gamma: clip_factors,
    "automatic": automatic_factors,
}
"""The rule that each `clip.rule=` names, made from `clip.gamma`."""


def keep_finite(factors: Tensor, squared_norms: Tensor) -> Tensor:
    """Set the factor of every example whose norm is not finite to exactly 0: it is left out of the sum."""
    return torch.where(squared_norms < math.inf, factors, 0.0)  # NaN is not


def is_sync_free(t: Tensor) -> bool:
    """Whether looking at a value costs nothing: elsewhere the host would wait for the device."""
    return t.device.type == "cpu"


def drop_zero_rows(factors: Tensor | None, rows: Tensor) -> Tensor:
    """Zero the rows (B, ...) of the examples that are left out (factor 0), whatever they hold (0 · NaN is NaN).

    On a CPU the common case, nobody left out, costs a look at B numbers; elsewhere rows are masked without asking,
    so that the host never waits for the device.
    """
    if factors is None or (is_sync_free(rows) and bool(factors.all())):
        return rows
    return rows.masked_fill((factors == 0).view(-1, *[1] * (rows.dim() - 1)), 0)


def scale_rows(rows: Tensor, factors: Tensor | None) -> Tensor:
    """rows_i · factor_i, and exact zeros for the examples left out; ``None`` keeps the rows as they are."""
    if factors is None:
        return rows
    return drop_zero_rows(factors, rows * factors.to(rows.dtype).view(-1, *[1] * (rows.dim() - 1)))


def weigh_rows(factors: Tensor, rows: Tensor) -> Tensor:
    """Σ_i factor_i · rows_i for rows (B, ...)."""
    return add_weighed_rows(None, factors, rows)


def add_weighed_rows(total: Tensor | None, factors: Tensor, rows: Tensor) -> Tensor:
    """total + Σ_i factor_i · rows_i, in place where there is a total."""
    flat, weights = drop_zero_rows(factors, rows).reshape(len(rows), -1), factors.to(rows.dtype)
    if total is None:
        return (weights @ flat).view(rows.shape[1:])
    total.view(1, -1).addmm_(weights.unsqueeze(0), flat)
    return total


def left_out(factors: Tensor) -> Tensor | None:
    """0 for examples that are left out and 1 for the others; None where it is known that nobody is."""
    keep = (factors != 0).to(factors.dtype)
    return None if is_sync_free(keep) and bool(keep.all()) else keep
