"""Finds the smallest noise multiplier σ whose ε, as an upper bound, is within the target (line 2 of Algorithm 1)."""

import contextlib
import functools
import math
from collections.abc import Callable

import numpy as np

from groupwise.errors import UserError
from groupwise.privacy.accountants import FEW_ORDERS, EpsilonBounds, check_release, epsilon_rdp, is_whole
from groupwise.privacy.accounting import (
    LARGEST,
    LARGEST_DELTA,
    MAX_ERROR,
    MOST_STEPS,
    RELATIVE_ERROR,
    SMALLEST,
    SMALLEST_DELTA,
    check_accountant,
    epsilon_bounds,
    estimate_prv,
)

TOLERANCE = 1e-3
LEAST, MOST = 1e-9, 1e12
"""The range in which σ is searched for."""
PATIENCE, CLOSEST = 10, 1e-6
"""After PATIENCE evaluations the search bisects, until the bracket is narrower than a relative CLOSEST."""


def calibrate(
    epsilon: float, delta: float, sample_rate: float, steps: int, accountant: str = "prv"
) -> tuple[float, EpsilonBounds]:
    """Find σ such that T steps at rate ρ are (``epsilon``, ``delta``)-DP: add/remove adjacency, Poisson sampling.

    Formal guarantee: ``epsilon_bounds(σ, ρ, T, δ, accountant).upper`` is at most ``epsilon``. It is at least 0.999 of
    ``epsilon``, unless ε(σ) jumps over that range (to 0, once δ alone suffices). Takes about a second.
    Returns σ and its bounds on ε.
    Raises :class:`UserError` for arguments out of range or a target that no σ reaches.
    """
    check_accountant(accountant)
    check_release(sample_rate, steps, delta)
    if not (math.isfinite(epsilon) and epsilon > 0):
        raise UserError(f"epsilon is {epsilon}; give a target above 0, or inf for a run without noise.")
    if sample_rate < 1.0 and delta >= -math.expm1(steps * math.log1p(-sample_rate)):
        raise UserError(
            f"delta is {delta}, at least the probability that an example is drawn in {steps} steps at rate "
            f"{sample_rate}. Publishing the drawn examples would satisfy it; give a delta far below 1/N."
        )
    return _search(epsilon, delta, sample_rate, int(steps), accountant)


@functools.lru_cache(maxsize=128)
def _search(
    epsilon: float, delta: float, sample_rate: float, steps: int, accountant: str
) -> tuple[float, EpsilonBounds]:
    mechanism, bounds = (sample_rate, steps, delta), dict[float, EpsilonBounds]()
    guess, most = _central_limit(epsilon, delta, sample_rate, steps), MOST
    usual = SMALLEST <= epsilon <= LARGEST and SMALLEST_DELTA <= delta <= LARGEST_DELTA and steps <= MOST_STEPS
    if accountant == "prv" and usual:
        with contextlib.suppress(UserError):  # an upper bound on σ, since RDP is the loosest accountant
            most, _ = solve(lambda sigma: epsilon_rdp(sigma, *mechanism, FEW_ORDERS), epsilon, guess)
        # An estimate takes a tenth of the time of a bound. So search with it, and aim lower by the bound's half-width.
        aim = epsilon - min(MAX_ERROR, RELATIVE_ERROR * epsilon)
        guess, _ = solve(lambda sigma: estimate_prv(sigma, *mechanism), aim, min(guess, most), most)

    def upper(noise_multiplier: float) -> float:
        bounds[noise_multiplier] = epsilon_bounds(noise_multiplier, *mechanism, accountant)
        return bounds[noise_multiplier].upper

    sigma, _ = solve(upper, epsilon, guess)
    return sigma, bounds[sigma]


def _central_limit(epsilon: float, delta: float, sample_rate: float, steps: int) -> float:
    """The σ whose `accountants.central_limit_mu` is the μ of a Gaussian release with this ε and δ."""
    from dp_accounting import get_sigma_gaussian

    with np.errstate(divide="ignore"):  # log(0) where δ is 0
        mu = 1.0 / get_sigma_gaussian(epsilon, delta)
    return float(min(math.log1p((mu / sample_rate) ** 2 / steps) ** -0.5, 1.0 / LEAST))


def solve(curve: Callable[[float], float], target: float, guess: float, most: float = math.inf) -> tuple[float, float]:
    """Find x with ``curve(x)`` in [(1 - TOLERANCE)·target, target], or just after a jump of the curve over that range.

    The curve must be decreasing, and below the target beyond ``most``. This is the secant method on log-log axes, kept
    inside the bracket of earlier values. Raises :class:`UserError` if there is no such x from `LEAST` to `MOST`.
    """
    aim = math.log(target) + math.log1p(-0.5 * TOLERANCE)
    low, high, found = -math.inf, math.log(most) + TOLERANCE, math.nan
    x, slope, last = math.log(guess), -1.5, None
    for tries in range(60):
        value = curve(math.exp(x))
        if (1.0 - TOLERANCE) * target <= value <= target:
            return math.exp(x), value
        if value > target:
            low = x
        else:
            high, found = x, value
        if high - low <= CLOSEST and not math.isnan(found):  # a jump, as to 0 once δ alone suffices
            return math.exp(high), found
        y = math.log(max(value, 1e-12))
        if last is not None and x != last[0]:
            slope = (y - last[1]) / (x - last[0])
        last = (x, y)
        step = (aim - y) / slope if slope < -1e-3 else math.copysign(0.5, y - aim)
        x += min(max(step, -1.0), 1.0)
        bracketed = low > -math.inf and high < math.inf
        if not low < x < high or (bracketed and tries >= PATIENCE):
            x = 0.5 * (low + high) if bracketed else max(high - 0.7, low + 0.7)
        if not LEAST < math.exp(x) < MOST:
            break
    raise UserError(
        f"no noise multiplier was found for epsilon {target:.6g}; give a larger one, fewer steps or a smaller batch."
    )


def split_noise(noise_multiplier: float, num_groups: int, quantile_budget: float) -> tuple[float, float]:
    """Return (σ_b, σ_new) = (σ√(K/(4r)), σ/√(1-r)), and (0, σ) when r = 0.

    Formal guarantee: counts of sensitivity ½√K with noise σ_b, and gradients of sensitivity S with noise Sσ_new,
    released from one batch, cost the same as one Gaussian release at σ: K/(4σ_b²) + 1/σ_new² = 1/σ². The counts use a
    share r of 1/σ².
    Raises :class:`UserError` unless K >= 1 and 0 <= r < 1.
    """
    if not is_whole(num_groups) or num_groups < 1:
        raise UserError(f"num_groups is {num_groups}; give the number of clipping groups K, at least 1.")
    if not 0.0 <= quantile_budget < 1.0:
        raise UserError(
            f"quantile_budget is {quantile_budget}; give 0 <= r < 1 (r = 1 would leave no budget for the gradients)."
        )
    if quantile_budget == 0.0:
        return 0.0, noise_multiplier
    count = noise_multiplier * math.sqrt(num_groups / (4.0 * quantile_budget))
    return count, noise_multiplier / math.sqrt(1.0 - quantile_budget)
