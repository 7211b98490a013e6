"""How the noise is spread over the groups: the weights γ_k of line 13 of Algorithm 1."""

import math
from collections.abc import Sequence

import torch

from groupwise.errors import UserError

ALLOCATIONS = ("global", "equal_budget", "weighted")


def noise_weights(
    thresholds: torch.Tensor | Sequence[float], sizes: torch.Tensor | Sequence[int], allocation: str
) -> torch.Tensor:
    """Return γ, float64 of shape (K,), for thresholds C (K,) and group sizes d (K,), numbers of parameters.

    "global": γ_k = 1; "equal_budget": γ_k = C_k; "weighted": γ_k = C_k/√d_k (§3.3 and appendix on noise allocation).
    Raises :class:`UserError` for an unknown allocation, a threshold that is not finite and positive, or an empty group.
    """
    c = _positive(thresholds, "thresholds")
    d = _positive(sizes, "sizes")
    if c.shape != d.shape:
        raise UserError(f"thresholds has {len(c)} entries and sizes {len(d)}; give one of each for every group.")
    if allocation == "global":
        return torch.ones_like(c)
    if allocation == "equal_budget":
        return c
    if allocation == "weighted":
        return c / d.sqrt()
    raise UserError(f"allocation is {allocation!r}; choose one of {', '.join(ALLOCATIONS)}.")


def sensitivity(thresholds: torch.Tensor | Sequence[float], weights: torch.Tensor | Sequence[float]) -> float:
    """Return S = (Σ_k C_k²/γ_k²)^½ (line 13 of Algorithm 1).

    Formal guarantee: if one example moves group k's sum by at most C_k in ℓ2, it moves (g_1/γ_1, …, g_K/γ_K) by at
    most S. ``thresholds`` must be those that clipped *this* batch.
    """
    return float((_positive(thresholds, "thresholds") / _positive(weights, "weights")).square().sum().sqrt())


def noise_stds(
    thresholds: torch.Tensor | Sequence[float],
    sizes: torch.Tensor | Sequence[int],
    noise_multiplier: float,
    allocation: str,
    *,
    groups_elsewhere: int = 0,
) -> torch.Tensor:
    """Return std_k = σ_new·S·γ_k, float64 of shape (K,), the noise on each coordinate of group k's *sum*.

    Formal guarantee: Σ_k (C_k/std_k)² = 1/σ_new² for every allocation, so releasing all K noisy sums costs exactly one
    Gaussian release with noise multiplier σ_new = ``noise_multiplier``. σ_new = 0 gives zeros (and no guarantee).

    With ``groups_elsewhere`` = K' more groups on other devices the sum runs over all K + K' groups, provided that every
    device counts all the others' groups: std_k = σ_new·√(K + K')·C_k (Algorithm 2). It takes "equal_budget", whose S
    is a root of a number of groups; the others' S needs the thresholds of all devices. Raises :class:`UserError`.
    """
    if not 0.0 <= noise_multiplier < float("inf"):
        raise UserError(f"noise_multiplier is {noise_multiplier}; give a finite number of at least 0.")
    if groups_elsewhere < 0:
        raise UserError(f"groups_elsewhere is {groups_elsewhere}; give the number of groups on other devices.")
    weights = noise_weights(thresholds, sizes, allocation)
    if groups_elsewhere and allocation != "equal_budget":
        raise UserError(
            f"allocation {allocation!r} needs the thresholds of the other devices: with groups on several devices set "
            "noise.allocation=equal_budget."
        )
    return noise_multiplier * math.hypot(sensitivity(thresholds, weights), math.sqrt(groups_elsewhere)) * weights


def _positive(values: torch.Tensor | Sequence[float], name: str) -> torch.Tensor:
    tensor = torch.as_tensor(values, dtype=torch.float64, device="cpu").detach()
    if tensor.ndim != 1 or tensor.numel() == 0 or not bool(((tensor > 0) & tensor.isfinite()).all()):
        raise UserError(f"{name} is {tensor.tolist()}; give a flat list of finite numbers above 0, one for each group.")
    return tensor
