"""Computes ε of composed Gaussian releases by privacy loss distributions, Rényi DP and closed forms."""

import functools
import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from groupwise.errors import UserError


@dataclass(frozen=True)
class EpsilonBounds:
    """``lower <= ε(δ) <= upper`` of the exact mechanism; ``upper`` alone may be claimed.

    ``estimate`` lies between and is no bound. ``note`` is empty unless another accountant had to answer.
    """

    lower: float
    estimate: float
    upper: float
    note: str = ""


def check_mechanism(noise_multiplier: float, sample_rate: float, steps: int, delta: float) -> None:
    """Refuse arguments for which no ε is defined; raises :class:`UserError` naming the one at fault."""
    if not (math.isfinite(noise_multiplier) and noise_multiplier > 0):
        raise UserError(f"noise_multiplier is {noise_multiplier}; give a finite number above 0 (0 means no guarantee).")
    check_release(sample_rate, steps, delta)


def check_release(sample_rate: float, steps: int, delta: float) -> None:
    """Refuse a sample rate, a number of steps or a δ outside its range; raises :class:`UserError`."""
    if not 0.0 < sample_rate <= 1.0:
        raise UserError(
            f"sample_rate is {sample_rate}; give B/N, above 0 and at most 1 (a sample is no larger than the data)."
        )
    if not is_whole(steps) or steps < 1:
        raise UserError(f"steps is {steps!r}; give the number of optimiser steps T, a whole number of at least 1.")
    if not 0.0 < delta < 1.0:
        raise UserError(f"delta is {delta}; give a probability strictly between 0 and 1, below 1/N.")


def is_whole(value: float) -> bool:
    """Return whether ``value`` is a whole number (3 and 3.0, but neither True, NaN nor infinity)."""
    return not isinstance(value, bool) and float(value).is_integer()


COMPOSITION_FAILURES = (RuntimeError, ValueError, AssertionError, ArithmeticError, MemoryError)
"""What the accountants' libraries raise where a quadrature, a domain, a grid or a float gives out."""


def gaussian_delta(epsilon: float, mu: float) -> float:
    """Return the exact δ of μ-Gaussian DP at ``epsilon`` (Balle & Wang 2018, Theorem 8).

    ``mu`` is sensitivity / standard deviation; T releases without subsampling compose to μ = √T / σ.
    """
    if mu <= 0.0:
        return 0.0
    near, far = epsilon / mu - mu / 2.0, epsilon / mu + mu / 2.0
    density = math.exp(-0.5 * near * near) / math.sqrt(2.0 * math.pi)
    # e^ε Φ(-far) = φ(near) · Φ(-far)/φ(far): the ratio stays finite where e^ε overflows.
    return max(0.0, 0.5 * math.erfc(near / math.sqrt(2.0)) - density * _mills_ratio(far))


def gaussian_epsilon(delta: float, mu: float) -> float:
    """Return the smallest ε ≥ 0 with ``gaussian_delta(ε, mu) <= delta`` (bisection to 1e-12, relative)."""
    if gaussian_delta(0.0, mu) <= delta:
        return 0.0
    low, high = 0.0, 1.0
    while gaussian_delta(high, mu) > delta:
        low, high = high, 2.0 * high
    while high - low > 1e-12 * high:
        middle = 0.5 * (low + high)
        low, high = (middle, high) if gaussian_delta(middle, mu) > delta else (low, middle)
    return high


def central_limit_mu(noise_multiplier: float, sample_rate: float, steps: int) -> float:
    """Return the μ that T Poisson-subsampled Gaussian steps tend to (Bu et al. 2020): ρ√(T(exp(σ⁻²) − 1)).

    An approximation, good for a first guess and a progress bar; it is **not** a bound. At ρ = 1 it is exact: √T/σ.
    """
    if sample_rate >= 1.0:
        return math.sqrt(steps) / noise_multiplier
    precision = 1.0 / noise_multiplier
    return sample_rate * math.sqrt(steps * math.expm1(min(precision * precision, 500.0)))


def _mills_ratio(x: float) -> float:
    if x < 25.0:
        return 0.5 * math.erfc(x / math.sqrt(2.0)) * math.sqrt(2.0 * math.pi) * math.exp(0.5 * x * x)
    return (1.0 - x**-2 + 3.0 * x**-4) / x


LARGEST_MU = 1e150
"""Beyond it the square of μ is no float any more."""


def nothing_shows(noise_multiplier: float, sample_rate: float, steps: int, delta: float) -> bool:
    """Whether δ alone covers all T steps, so that they are (0, δ)-DP.

    One step's χ² divergence, with an example from without it, is ρ²(exp(σ⁻²) − 1), its relative entropy is no larger,
    relative entropies of (adaptive) steps add up, and by Pinsker's inequality the total variation is at most the root
    of half their sum. Total variation is symmetric, so this holds for adding an example as for removing one.
    """
    check_mechanism(noise_multiplier, sample_rate, steps, delta)
    # At ρ = 1 this is √T/σ, below the root of T(exp(σ⁻²) − 1), and the relative entropy is T/2σ² itself.
    return central_limit_mu(noise_multiplier, sample_rate, steps) <= math.sqrt(2.0) * delta


def epsilon_revealed(noise_multiplier: float, sample_rate: float, steps: int, delta: float) -> EpsilonBounds:
    """Bound ε at ``delta`` as if it were known at which steps an example was drawn; for any σ above 0.

    Who is drawn k times in T is seen through k Gaussian releases, together one of μ = √k/σ. With k* passed with
    probability at most δ/2, δ(ε) ≤ δ/2 + δ_μ*(ε). What is hidden in truth can only make ε smaller, by about log(1/ρ)
    for each of those k* steps: a few percent of an ε in the thousands, and far too much of one below 10.
    """
    check_mechanism(noise_multiplier, sample_rate, steps, delta)
    draws, left = float(steps), delta
    if sample_rate < 1.0:
        from scipy.stats import binom

        quantile = float(binom.isf(delta / 2.0, steps, sample_rate))
        if 0.0 <= quantile < steps and float(binom.sf(quantile, steps, sample_rate)) <= delta / 2.0:
            draws, left = quantile, delta / 2.0
    mu = math.sqrt(draws) / noise_multiplier
    upper = gaussian_epsilon(left, mu) if mu < LARGEST_MU else math.inf
    note = "in closed form, as if it were known which examples were drawn, since there is too little noise to do better"
    return EpsilonBounds(0.0, upper, upper, note)


# Tenths below 11 matter for ε above 1; the long tail for small ε, whose best order is far above 64.
ORDERS = (
    *(1.0 + tenth / 10.0 for tenth in range(1, 100)),
    *range(11, 64),
    *range(64, 256, 8),
    *range(256, 1025, 64),
)


MOST_NOISE = 1e5
"""What a step without sampling costs at it, α/2σ², is the least that a step is said to cost: of less, about ρ²α/2σ²,
the rounding of a sum near 1 leaves nothing sure, and may show less than nothing."""


def epsilon_rdp(
    noise_multiplier: float, sample_rate: float, steps: int, delta: float, orders: tuple[float, ...] | None = None
) -> float:
    """Return an upper bound on ε at ``delta`` by Rényi DP (Mironov, Talwar & Zhang 2019), add/remove adjacency.

    The guarantee is that of :func:`~groupwise.privacy.accounting.epsilon_bounds`; any finite set of ``orders`` is
    valid, by default `ORDERS`.
    """
    check_mechanism(noise_multiplier, sample_rate, steps, delta)
    from dp_accounting import rdp

    orders = orders or ORDERS
    return float(rdp.compute_epsilon(orders, rdp_of_steps(noise_multiplier, sample_rate, steps, orders), delta)[0])


def rdp_of_steps(
    noise_multiplier: float, sample_rate: float, steps: int, orders: tuple[float, ...] | None = None
) -> NDArray[np.float64]:
    """Return an upper bound on the RDP of T steps at ``orders``, or `ORDERS`; inf at those not to be computed."""
    orders = orders or ORDERS
    rdp = int(steps) * _rdp_of_a_step(min(noise_multiplier, MOST_NOISE), sample_rate, orders)
    return np.maximum(rdp, steps * np.array(orders) / (2.0 * MOST_NOISE**2))


@functools.lru_cache(maxsize=256)  # a tenth of a second, and a plan asks again and again
def _rdp_of_a_step(noise_multiplier: float, sample_rate: float, orders: tuple[float, ...]) -> NDArray[np.float64]:
    from dp_accounting import rdp

    accountant = rdp.RdpAccountant(orders=orders)
    with _orders_left_out_in_silence():
        accountant.compose(training_event(noise_multiplier, sample_rate))
    return accountant.rdp


@contextmanager
def _orders_left_out_in_silence() -> Iterator[None]:
    """dp-accounting warns of each order whose series does not converge, and leaves it out, which is sound."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


_INTERVAL = 1e-4


def training_event(noise_multiplier: float, sample_rate: float) -> Any:
    """Return one DP-SGD step as a ``dp_accounting`` event: a Gaussian release inside a Poisson sample."""
    import dp_accounting

    return dp_accounting.PoissonSampledDpEvent(sample_rate, dp_accounting.GaussianDpEvent(noise_multiplier))


def epsilon_pld(
    noise_multiplier: float, sample_rate: float, steps: int, delta: float, *, interval: float | None = None
) -> float:
    """Return an upper bound on ε at ``delta``, from privacy losses rounded pessimistically to ``interval``.

    The guarantee is that of :func:`~groupwise.privacy.accounting.epsilon_bounds`; both directions (one example added,
    one removed) are composed and the worse is taken. A smaller ``interval`` is tighter and slower; the default is 1e-4,
    wider where ε is above 10.
    """
    check_mechanism(noise_multiplier, sample_rate, steps, delta)
    if interval is None:
        interval = _interval(noise_multiplier, sample_rate, steps, delta)
    import dp_accounting
    from dp_accounting import pld

    accountant = pld.PLDAccountant(
        dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE, value_discretization_interval=interval
    )
    accountant.compose(training_event(noise_multiplier, sample_rate), int(steps))
    return float(accountant.get_epsilon(delta))


def epsilon_pld_bounds(noise_multiplier: float, sample_rate: float, steps: int, delta: float) -> EpsilonBounds:
    """Bracket ε at ``delta`` between losses rounded optimistically and pessimistically."""
    interval = _interval(noise_multiplier, sample_rate, steps, delta)
    upper = epsilon_pld(noise_multiplier, sample_rate, steps, delta, interval=interval)
    from dp_accounting.pld import privacy_loss_distribution

    optimistic = privacy_loss_distribution.from_gaussian_mechanism(
        noise_multiplier,
        sampling_prob=sample_rate,
        value_discretization_interval=interval,
        pessimistic_estimate=False,
        use_connect_dots=False,
    )
    lower = float(optimistic.self_compose(int(steps)).get_epsilon_for_delta(delta))
    return EpsilonBounds(min(lower, upper), upper, upper)


def _interval(noise_multiplier: float, sample_rate: float, steps: int, delta: float) -> float:
    """Return how finely to round losses: 1e-4 up to ε = 10, then 1e-6·ε², at last 1e-4·ε, to bound time and memory; up
    to 1e-3 where steps are so few that this moves the lower bound by a thousandth at most, and the upper one by some
    1e-6; and up to ε = 10 a small part of the spread of one step's losses, and of all steps' together, where it is
    less."""

    epsilon = epsilon_rdp(noise_multiplier, sample_rate, steps, delta)
    few = min(10.0 * _INTERVAL, 1e-3 * epsilon / steps)
    if epsilon > 10.0:
        return max(_INTERVAL, few, min(1e-6 * epsilon**2, 1e-4 * epsilon))
    spread = central_limit_mu(noise_multiplier, sample_rate, steps)
    usual = max(_INTERVAL, few) if delta <= 0.01 else 10.0 * _INTERVAL  # such a δ goes with widely spread losses
    return min(usual, spread * max(1e-5, min(1e-3, 0.1 / math.sqrt(steps))))
