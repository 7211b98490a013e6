"""Computes ε of composed Gaussian releases by Rényi DP and by privacy loss distributions, both from dp-accounting."""

import functools
import logging
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from groupwise.errors import UserError


@dataclass(frozen=True)
class EpsilonBounds:
    """``lower <= ε(δ) <= upper`` for the exact mechanism; only ``upper`` is a guarantee.

    ``estimate`` lies in between and is not a bound. ``note`` says which accountant was used if it is not the requested
    one, and why; otherwise it is empty.
    """

    lower: float
    estimate: float
    upper: float
    note: str = ""


def check_mechanism(noise_multiplier: float, sample_rate: float, steps: int, delta: float) -> None:
    """Raise a :class:`UserError` for an argument outside its range."""
    if not LEAST_NOISE <= noise_multiplier < math.inf:
        raise UserError(
            f"noise_multiplier is {noise_multiplier}; give a finite number of at least {LEAST_NOISE:g} (0 means no "
            "guarantee)."
        )
    check_release(sample_rate, steps, delta)


def check_release(sample_rate: float, steps: int, delta: float) -> None:
    """Raise a :class:`UserError` for a sample rate, a number of steps or a δ outside its range."""
    if not 0.0 < sample_rate <= 1.0:
        raise UserError(
            f"sample_rate is {sample_rate}; give B/N, above 0 and at most 1 (a batch is at most the whole data set)."
        )
    if not is_whole(steps) or steps < 1:
        raise UserError(f"steps is {steps!r}; give the number of optimiser steps T, a whole number of at least 1.")
    if not 0.0 < delta < 1.0:
        raise UserError(f"delta is {delta}; give a probability strictly between 0 and 1, below 1/N.")


def is_whole(value: float) -> bool:
    """Return whether ``value`` is a whole number (3 and 3.0, but neither True, NaN nor infinity)."""
    return not isinstance(value, bool) and float(value).is_integer()


COMPOSITION_FAILURES = (RuntimeError, ValueError, AssertionError, ArithmeticError, MemoryError)
"""Errors that the accountants' libraries raise if an integral, a grid or a floating-point operation fails."""


def gaussian_epsilon(delta: float, mu: float) -> float:
    """Return the exact ε of μ-Gaussian DP at ``delta`` (Balle & Wang 2018, Theorem 8).

    ``mu`` is sensitivity / standard deviation. T releases without subsampling compose to μ = √T / σ.
    """
    from dp_accounting import get_epsilon_gaussian

    with np.errstate(divide="ignore"):  # log(0) where δ is 0
        return float(get_epsilon_gaussian(1.0 / mu, delta)) if mu > 0.0 else 0.0


def central_limit_mu(noise_multiplier: float, sample_rate: float, steps: int) -> float:
    """Return μ in the central limit of T Poisson-subsampled Gaussian steps (Bu et al. 2020): ρ√(T(exp(σ⁻²) − 1)).

    An approximation, **not** a bound; at ρ = 1 it is exact: √T/σ.
    """
    if sample_rate >= 1.0:
        return math.sqrt(steps) / noise_multiplier
    return sample_rate * math.sqrt(steps * math.expm1(min(noise_multiplier**-2, 500.0)))


# Orders below 11 matter for ε above 1; the large ones for small ε, whose best order is far above 64.
ORDERS = (*(1.0 + tenth / 10.0 for tenth in range(1, 100)), *range(11, 64), *range(64, 256, 8), *range(256, 1025, 64))
FEW_ORDERS = (1.5, *range(2, 17), *range(20, 65, 4), *range(96, 257, 32), 384, 512, 768, 1024)
"""For bounds that need not be tight, in a tenth of the time."""
LEAST_NOISE, MOST_NOISE = 1e-12, 1e5
"""The range of σ. A larger σ is accounted for as MOST_NOISE, and the RDP of a step is taken to be at least α/(2σ²) for
σ = MOST_NOISE, as without sampling: smaller values would be lost to rounding in sums near 1."""


def epsilon_rdp(
    noise_multiplier: float, sample_rate: float, steps: int, delta: float, orders: tuple[float, ...] = ORDERS
) -> float:
    """Return an upper bound on ε at ``delta`` by Rényi DP (Mironov, Talwar & Zhang 2019), add/remove adjacency.

    The guarantee is that of :func:`~groupwise.privacy.accounting.epsilon_bounds`. The bound is valid for any
    ``orders`` above 1.
    """
    check_mechanism(noise_multiplier, sample_rate, steps, delta)
    return curve_epsilon(rdp_of_steps(noise_multiplier, sample_rate, steps, orders), delta, orders)


def curve_epsilon(rdp: NDArray[np.float64], delta: float, orders: tuple[float, ...] = ORDERS) -> float:
    """Return ε at δ for RDP at ``orders`` (Canonne, Kamath & Steinke 2020, Proposition 12)."""
    from dp_accounting.rdp import compute_epsilon

    return float(compute_epsilon(orders, rdp, delta)[0])


def rdp_of_steps(
    noise_multiplier: float, sample_rate: float, steps: int, orders: tuple[float, ...] = ORDERS
) -> NDArray[np.float64]:
    """Return an upper bound on the RDP of T steps at ``orders``; inf at orders that fail."""
    rdp = int(steps) * _rdp_of_a_step(min(noise_multiplier, MOST_NOISE), sample_rate, orders)
    return np.maximum(rdp, steps * np.array(orders) / (2.0 * MOST_NOISE**2))


@functools.lru_cache(maxsize=256)  # takes a tenth of a second, and a plan calls it many times
def _rdp_of_a_step(noise_multiplier: float, sample_rate: float, orders: tuple[float, ...]) -> NDArray[np.float64]:
    return _rdp_of_event(training_event(noise_multiplier, sample_rate), orders)


def _rdp_of_event(event: Any, orders: tuple[float, ...]) -> NDArray[np.float64]:
    """Return the RDP of a ``dp_accounting`` event at ``orders``; inf at orders that fail."""
    from dp_accounting.rdp import RdpAccountant

    accountant, logger = RdpAccountant(orders=orders), logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.ERROR)  # it warns about each order whose series diverges; skipping the order is sound
    try:
        return accountant.compose(event).rdp
    finally:
        logger.setLevel(level)


def training_event(noise_multiplier: float, sample_rate: float) -> Any:
    """Return one DP-SGD step as a ``dp_accounting`` event: a Gaussian release inside a Poisson sample."""
    import dp_accounting

    return dp_accounting.PoissonSampledDpEvent(sample_rate, dp_accounting.GaussianDpEvent(noise_multiplier))


MOST_RUNS = 1e5  # in expectation, in a search


def logseries_argument(runs: float) -> float:
    """Return the p for which numpy's ``Generator.logseries(p)`` has the mean ``runs``.

    Raises :class:`UserError` unless 1 < ``runs`` <= `MOST_RUNS`.
    """
    from scipy.optimize import brentq

    if not 1.0 < runs <= MOST_RUNS:
        raise UserError(f"runs is {runs:g}; give their expected number, above 1 and at most {MOST_RUNS:g}.")
    return float(brentq(lambda p: -p / ((1.0 - p) * math.log1p(-p)) - runs, 1e-9, 1.0 - 1e-9, xtol=1e-12))


def best_run_epsilon(noise_multiplier: float, sample_rate: float, steps: int, delta: float, runs: float) -> float:
    """Return an upper bound on ε at ``delta`` of the best of K trainings (Papernot & Steinke 2022, Theorem 2, η = 0).

    Formal guarantee, by Rényi DP: draw K once from numpy's ``logseries``, with mean ``runs``. Each of the K trainings
    takes T steps as in :func:`~groupwise.privacy.accounting.epsilon_bounds`, with settings drawn independently from one
    distribution that does not depend on the data. Then the best model and its settings are (ε, ``delta``)-DP, if scores
    are computed on examples that ε does not cover, and nothing else is released, not even K.
    Raises :class:`UserError` for arguments out of range.
    """
    from dp_accounting import SelfComposedDpEvent
    from dp_accounting.dp_event import RepeatAndSelectDpEvent

    check_mechanism(noise_multiplier, sample_rate, steps, delta)
    logseries_argument(runs)
    training = SelfComposedDpEvent(training_event(noise_multiplier, sample_rate), int(steps))
    return curve_epsilon(_rdp_of_event(RepeatAndSelectDpEvent(training, runs, 0.0), ORDERS), delta)


MESH, FINEST, MOST_POINTS = 3e-3, 1e-2, 3e5
"""Each step's privacy loss is rounded to multiples of MESH·ε/√T, or of FINEST times the spread of one step's loss if
that is larger. Rounding is split between the two neighbouring multiples, which keeps the mean of the composed loss. It
increases the variance by at most MESH²ε²/4, or by a share FINEST²/4, which changes ε by a relative 1e-4 or less. More
than MOST_POINTS multiples would take minutes, so for σ < 1 and ε < 0.04, say, ε is larger by 0.1 to 10 %."""


def epsilon_pld(noise_multiplier: float, sample_rate: float, steps: int, delta: float) -> float:
    """Return an upper bound on ε at ``delta`` by pessimistic privacy loss distributions (Doroshenko et al. 2022).

    The guarantee is that of :func:`~groupwise.privacy.accounting.epsilon_bounds`. It is the larger ε of adding and of
    removing an example.
    """
    check_mechanism(noise_multiplier, sample_rate, steps, delta)
    return releases_epsilon([(noise_multiplier, sample_rate, steps)], delta)


def releases_epsilon(releases: Iterable[tuple[float, float, int]], delta: float) -> float:
    """Return the bound of `epsilon_pld` for several mechanisms (σ, ρ, T) together, or their RDP bound if smaller."""
    from dp_accounting.pld.privacy_loss_distribution import from_gaussian_mechanism

    releases = [(min(sigma, MOST_NOISE), rate, int(steps)) for sigma, rate, steps in releases]
    total = sum(steps for *_, steps in releases)
    finest = FINEST * min(min(central_limit_mu(sigma, rate, 1), 1.0 / sigma) for sigma, rate, _ in releases)
    rare = math.log(1e-4 * delta / total)  # less likely losses of a step count as infinite
    ends = math.sqrt(-2.0 * rare)  # in units of σ
    losses = (np.logaddexp(0.0, math.log(rate) + ends / sigma + 0.5 / sigma**2) for sigma, rate, _ in releases)
    finest = max(finest, float(max(losses)) / MOST_POINTS)
    before, bound = math.inf, curve_epsilon(np.sum([rdp_of_steps(*release) for release in releases], axis=0), delta)
    while 0.0 < bound < 0.5 * before:  # refine the mesh as long as it was chosen for a bound that was far too large
        before, mesh = bound, max(MESH * bound / math.sqrt(total), finest)
        each = [
            from_gaussian_mechanism(
                sigma, sampling_prob=rate, value_discretization_interval=mesh, log_mass_truncation_bound=rare
            ).self_compose(steps)
            for sigma, rate, steps in releases
        ]
        composed = functools.reduce(lambda one, other: one.compose(other), each)
        with np.errstate(over="ignore"):  # a huge ε overflows to inf
            bound = min(bound, float(composed.get_epsilon_for_delta(delta)))
    return bound
