"""How one noise multiplier σ is split between clip counts and gradients (the proposition on σ_new)."""

import math

from groupwise.errors import UserError


def split_noise(noise_multiplier: float, num_groups: int, quantile_budget: float) -> tuple[float, float]:
    """Return (σ_b, σ_new) = (σ√(K/(4r)), σ/√(1-r)), and (0, σ) when r = 0.

    Formal guarantee: counts of sensitivity ½√K noised at σ_b, and gradients of sensitivity S at Sσ_new, released from
    one batch, cost as much as one Gaussian release at σ: K/(4σ_b²) + 1/σ_new² = 1/σ². The counts take a share r of it.
    Raises :class:`UserError` unless 0 <= r < 1.
    """
    if not 0.0 <= quantile_budget < 1.0:
        raise UserError(
            f"quantile_budget is {quantile_budget}; give 0 <= r < 1 (at r = 1 sigma_b is too small: "
            "sigma_b = sigma*sqrt(K)/2 spends the whole budget on the counts and leaves none for the gradients)."
        )
    if quantile_budget == 0.0:
        return 0.0, noise_multiplier
    count = noise_multiplier * math.sqrt(num_groups / (4.0 * quantile_budget))
    if not math.isfinite(count):
        raise UserError(
            f"quantile_budget is {quantile_budget}; so small a share makes the counts' noise infinite: give more."
        )
    return count, noise_multiplier / math.sqrt(1.0 - quantile_budget)
