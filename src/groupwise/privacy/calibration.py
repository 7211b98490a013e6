"""Finds the smallest noise multiplier σ whose proven ε does not pass the target (line 2 of Algorithm 1)."""

import importlib.metadata
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from groupwise.cache import read_cache, write_cache
from groupwise.errors import UserError
from groupwise.privacy.accountants import (
    EpsilonBounds,
    central_limit_mu,
    check_release,
    epsilon_revealed,
    gaussian_epsilon,
)
from groupwise.privacy.accounting import (
    CLOSED_ABOVE,
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
"""Between these a σ is looked for."""
PATIENCE, CLOSEST = 10, 1e-6
"""After so many tries the bracket is halved, until its ends are no further apart than this share: as good as one."""
_CODE_VERSION = 2
LIBRARIES = ("prv-accountant", "dp-accounting", "numpy", "scipy")
"""Those whose version may change what is proven."""


@dataclass(frozen=True)
class Calibration:
    """A noise multiplier σ with the ε it was shown to have; ``note`` says when another accountant stood in."""

    noise_multiplier: float
    epsilon_upper: float
    note: str = ""


def calibrate(
    epsilon: float, delta: float, sample_rate: float, steps: int, accountant: str = "prv", *, cache: bool = True
) -> Calibration:
    """Find σ such that T steps at rate ρ are (``epsilon``, ``delta``)-DP, add/remove adjacency, Poisson samples.

    Formal guarantee: ``epsilon_bounds(σ, ρ, T, δ, accountant).upper`` lies in [0.999 ``epsilon``, ``epsilon``], never
    above (but it may lie below where it leaps, as to 0 where δ begins to cover everything). Takes 2 to 4 evaluations;
    the answer is cached on disk under all arguments and the libraries' versions; what other versions of them found is
    taken where one evaluation here proves it.
    Raises :class:`UserError` for arguments out of range or a target that no σ reaches.
    """
    check_accountant(accountant)
    check_release(sample_rate, steps, delta)
    if not (math.isfinite(epsilon) and epsilon > 0):
        raise UserError(f"epsilon is {epsilon}; give a finite target above 0 (infinity needs no calibration).")
    if sample_rate < 1.0 and delta >= -math.expm1(steps * math.log1p(-sample_rate)):
        raise UserError(
            f"delta is {delta}, at least the chance that an example is ever drawn in {steps} steps at rate "
            f"{sample_rate}; publishing the drawn examples would satisfy it: give a delta far below 1/N."
        )
    key = {
        "version": _CODE_VERSION,
        "epsilon": epsilon,
        "delta": delta,
        "sample_rate": sample_rate,
        "steps": int(steps),
        "accountant": accountant,
    }
    libraries = {name: _version(name) for name in LIBRARIES}
    found = _from_cache(key, epsilon) if cache else None
    if found is not None and found[1] == libraries:
        return found[0]
    known = found and _proven(found[0].noise_multiplier, epsilon, delta, sample_rate, int(steps), accountant)
    result = known or _search(epsilon, delta, sample_rate, int(steps), accountant)
    if cache:
        write_cache("noise_multiplier", key, [result.noise_multiplier, result.epsilon_upper, result.note, libraries])
    return result


def _proven(
    sigma: float, epsilon: float, delta: float, sample_rate: float, steps: int, accountant: str
) -> Calibration | None:
    """A σ that other versions of the libraries found, where these prove it too: so a run that moves keeps its plan."""
    bounds = epsilon_bounds(sigma, sample_rate, steps, delta, accountant)
    near = (1.0 - TOLERANCE) * epsilon <= bounds.upper <= epsilon
    return Calibration(sigma, bounds.upper, bounds.note) if near else None


def _search(epsilon: float, delta: float, sample_rate: float, steps: int, accountant: str) -> Calibration:
    def central_limit(noise_multiplier: float) -> float:
        return gaussian_epsilon(delta, central_limit_mu(noise_multiplier, sample_rate, steps))

    def closed(noise_multiplier: float) -> float:
        return epsilon_revealed(noise_multiplier, sample_rate, steps, delta).upper

    shape = central_limit if epsilon <= CLOSED_ABOVE else closed
    guess = _first_guess(shape, epsilon)
    usual = SMALLEST <= epsilon <= LARGEST and SMALLEST_DELTA <= delta <= LARGEST_DELTA and steps <= MOST_STEPS
    if accountant == "prv" and usual:
        # Estimates cost a tenth of a bound: walk with them, aiming below the target by the bound's own width.
        aim = epsilon - min(MAX_ERROR, RELATIVE_ERROR * epsilon)
        guess, _ = _solve(lambda sigma: estimate_prv(sigma, sample_rate, steps, delta), aim, guess, central_limit)

    bounds: dict[float, EpsilonBounds] = {}

    def upper(noise_multiplier: float) -> float:
        bounds[noise_multiplier] = epsilon_bounds(noise_multiplier, sample_rate, steps, delta, accountant)
        return bounds[noise_multiplier].upper

    sigma, proven = _solve(upper, epsilon, guess, shape)
    return Calibration(sigma, proven, bounds[sigma].note)


def _solve(
    curve: Callable[[float], float], target: float, guess: float, shape: Callable[[float], float]
) -> tuple[float, float]:
    """Find σ with ``curve(σ)`` in [(1 - TOLERANCE)·target, target], or the least below where the curve leaps over that.

    Each try moves along the line through the last two points on log-log axes (along ``shape`` after the first),
    kept inside the bracket that the values seen so far allow.
    """
    aim = math.log(target) + math.log1p(-0.5 * TOLERANCE)
    low, high = 0.0, math.inf
    sigma = guess
    last: tuple[float, float] | None = None
    seen: dict[float, float] = {}
    for tries in range(60):
        value = seen[sigma] = curve(sigma)
        if (1.0 - TOLERANCE) * target <= value <= target:
            return sigma, value
        low, high = (max(low, sigma), high) if value > target else (low, min(high, sigma))
        point = (math.log(sigma), math.log(max(value, 1e-12)))
        slope = _slope(last, point) if last else _slope(*_nearby(shape, sigma))
        last = point
        step = (aim - point[1]) / slope if slope < -1e-3 else math.copysign(0.5, point[1] - aim)
        sigma = math.exp(point[0] + min(max(step, -1.0), 1.0))
        if not low < sigma < high or (tries >= PATIENCE and low > 0.0 and high < math.inf):
            sigma = high / 2.0 if low == 0.0 else low * 2.0 if high == math.inf else math.sqrt(low * high)
        if high <= low * (1.0 + CLOSEST) and high in seen:
            return high, seen[high]  # the curve falls past the target at once, as where δ begins to cover all
        if not LEAST < sigma < MOST:
            break
    raise UserError(
        f"no noise multiplier between {LEAST:g} and {MOST:g} was found for epsilon {target:.6g}; "
        "give a larger epsilon, fewer steps or a smaller batch."
    )


def _slope(first: tuple[float, float], second: tuple[float, float]) -> float:
    run = second[0] - first[0]
    return (second[1] - first[1]) / run if run else 0.0


def _nearby(curve: Callable[[float], float], sigma: float) -> tuple[tuple[float, float], tuple[float, float]]:
    points = [(math.log(s), math.log(max(curve(s), 1e-12))) for s in (sigma, 1.02 * sigma)]
    return points[0], points[1]


def _first_guess(curve: Callable[[float], float], epsilon: float) -> float:
    low, high = (math.log(0.05), math.log(1e8)) if epsilon <= CLOSED_ABOVE else (math.log(LEAST), math.log(1e3))
    for _ in range(40):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if curve(math.exp(middle)) > epsilon else (low, middle)
    return math.exp(high)


def _from_cache(key: dict[str, object], epsilon: float) -> tuple[Calibration, dict[str, str]] | None:
    """What was found, and by which versions of the libraries."""
    value: Any = read_cache("noise_multiplier", key)
    try:
        found = Calibration(float(value[0]), float(value[1]), str(value[2]))
        libraries = dict(value[3])
    except (TypeError, ValueError, IndexError, KeyError):
        return None
    sound = math.isfinite(found.noise_multiplier) and found.noise_multiplier > 0 and found.epsilon_upper <= epsilon
    return (found, libraries) if sound else None


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "absent"


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
