"""Bounds ε of T Poisson-subsampled Gaussian releases by the accountant that is asked for; holds PRV (Gopi et al.)."""

import functools
import math
import warnings
from typing import Any

from groupwise.errors import UserError
from groupwise.privacy.accountants import (
    COMPOSITION_FAILURES,
    ORDERS,
    EpsilonBounds,
    central_limit_mu,
    check_mechanism,
    epsilon_pld,
    epsilon_pld_bounds,
    epsilon_rdp,
    epsilon_revealed,
    gaussian_epsilon,
    nothing_shows,
)

ACCOUNTANTS = ("prv", "pld", "rdp")
CLOSED_ABOVE, CLOSED_ALONE = 1e3, 1e5
"""From the first ε on the closed form may be the smallest bound; from the second on it is within a few percent of any
other, and the others lose their way."""
SMALLEST_DELTA, MOST_STEPS = 1e-12, 1e8
"""Below this δ the rounding of Fourier transforms, some 1e-16, may show in PRV and PLD; past these steps both crawl."""


def epsilon_bounds(
    noise_multiplier: float, sample_rate: float, steps: int, delta: float, accountant: str = "prv"
) -> EpsilonBounds:
    """Bound ε at ``delta`` for ``steps`` compositions of the Poisson-subsampled Gaussian mechanism.

    Formal guarantee: let each of T steps draw every example independently with probability ρ (``sample_rate``),
    sum vectors that one example moves by at most 1 in ℓ2, and add N(0, σ²I) with σ = ``noise_multiplier``.
    Then all T outputs together are (``upper``, ``delta``)-DP when one example is added or removed.
    Covered: adaptive choices between steps that depend on earlier outputs. Not covered: shuffled or fixed-size batches,
    replacing an example, and floating-point noise. Only "prv" and "pld" know a lower bound; "rdp" gives 0.
    """
    check_accountant(accountant)
    check_mechanism(noise_multiplier, sample_rate, steps, delta)

    if nothing_shows(noise_multiplier, sample_rate, steps, delta):
        return EpsilonBounds(0.0, 0.0, 0.0, "in closed form, since delta alone covers what so noisy steps release")
    mechanism = (noise_multiplier, sample_rate, int(steps), delta)
    closed = epsilon_revealed(*mechanism)
    bounds = closed if closed.upper > CLOSED_ALONE else _composed_or_closed(*mechanism, accountant, closed)
    if not math.isfinite(bounds.upper):
        raise UserError(
            f"noise_multiplier is {noise_multiplier}; that is too little noise for any finite epsilon to be shown at "
            f"delta {delta}: give more, or 0 for none."
        )
    return bounds


def _composed_or_closed(
    noise_multiplier: float, sample_rate: float, steps: int, delta: float, accountant: str, closed: EpsilonBounds
) -> EpsilonBounds:
    try:
        bounds = _composed(noise_multiplier, sample_rate, steps, delta, accountant)
    except COMPOSITION_FAILURES:
        return closed
    return bounds if bounds.upper <= max(CLOSED_ABOVE, closed.upper) else closed


@functools.lru_cache(maxsize=128)  # the last ε of a calibration is that of the plan, and of the run that keeps to it
def _composed(noise_multiplier: float, sample_rate: float, steps: int, delta: float, accountant: str) -> EpsilonBounds:
    reason = ""
    if accountant != "rdp" and delta < SMALLEST_DELTA:
        reason = (
            f"delta is below {SMALLEST_DELTA:g}, where the rounding of the {accountant.upper()} accountant would show"
        )
    elif accountant != "rdp" and steps > MOST_STEPS:
        reason = f"no grid of the {accountant.upper()} accountant is made for more than {MOST_STEPS:g} steps"
    elif accountant == "prv":
        return epsilon_prv(noise_multiplier, sample_rate, steps, delta)
    elif accountant == "pld":
        return epsilon_pld_bounds(noise_multiplier, sample_rate, steps, delta)

    upper = epsilon_rdp(noise_multiplier, sample_rate, steps, delta)
    return EpsilonBounds(0.0, upper, upper, reason and f"by the RDP accountant, since {reason}")


def check_accountant(accountant: str) -> None:
    """Refuse an unknown accountant; raises :class:`UserError`."""
    if accountant not in ACCOUNTANTS:
        raise UserError(f"accountant is {accountant!r}; choose one of {', '.join(ACCOUNTANTS)}.")


# ε is bracketed to ±0.2 % (at most ±0.01, so that large ε are as tight as the published tables), unless the grid
# would pass MAX_GRID points, where the time would be minutes and the memory gigabytes: the bracket then widens.
RELATIVE_ERROR = 2e-3
MAX_ERROR = 1e-2
MAX_GRID = 2**22
COARSE = 0.03
SMALLEST, LARGEST, LARGEST_DELTA = 0.04, 50.0, 0.01
"""The ε and δ for which PRV answers within seconds; outside, PLD is as tight and takes a tenth of one."""


def epsilon_prv(
    noise_multiplier: float, sample_rate: float, steps: int, delta: float, *, eps_error: float | None = None
) -> EpsilonBounds:
    """Bracket ε at ``delta`` with the PRV accountant; ``upper`` is the figure to claim.

    The guarantee is that of :func:`~groupwise.privacy.accounting.epsilon_bounds`. ``eps_error`` is the half-width of
    the bracket (the δ error is δ/1000); by default 0.2 % of ε, at most 0.01. The losses composed are those of removing
    an example; that adding one costs no more is proven for one step and, for the paper's settings, confirmed by the
    PLD accountant, which composes both. Should the numerical accountant fail twice, the answer is the PLD accountant's,
    and ``note`` says so.
    """
    check_mechanism(noise_multiplier, sample_rate, steps, delta)
    steps = int(steps)
    if eps_error is None and (reason := _out_of_reach(noise_multiplier, sample_rate, steps, delta)):
        return _stand_in(noise_multiplier, sample_rate, steps, delta, reason)
    try:
        if eps_error is None:
            eps_error = _default_error(noise_multiplier, sample_rate, steps, delta)
        return _twice(noise_multiplier, sample_rate, steps, delta, eps_error)[0]
    except COMPOSITION_FAILURES:  # little noise at a high rate: cifar at scale=smoke, sst2 at scale=demo
        reason = "the PRV accountant finds no grid for these numbers that passes its own checks"
        return _stand_in(noise_multiplier, sample_rate, steps, delta, reason)


def estimate_prv(noise_multiplier: float, sample_rate: float, steps: int, delta: float) -> float:
    """Return ε without a bound, from a grid ten times coarser: right to about 0.01 %, in a tenth of a second."""
    steps = int(steps)
    if not _out_of_reach(noise_multiplier, sample_rate, steps, delta):
        try:
            return _coarse(noise_multiplier, sample_rate, steps, delta)[0].estimate
        except COMPOSITION_FAILURES:
            pass

    return epsilon_pld(noise_multiplier, sample_rate, steps, delta)


def _out_of_reach(noise_multiplier: float, sample_rate: float, steps: int, delta: float) -> str:
    """Why PRV would take minutes, or give out in the end, at so small or so large an ε; empty where it does well."""
    if delta > LARGEST_DELTA:
        return f"the PRV accountant gives out for a delta above {LARGEST_DELTA:g}"
    if gaussian_epsilon(delta, central_limit_mu(noise_multiplier, sample_rate, steps)) < SMALLEST:
        return f"the PRV accountant takes minutes for an epsilon below {SMALLEST:g}"

    mechanism = (noise_multiplier, sample_rate, steps, delta)
    if epsilon_rdp(*mechanism, ORDERS[::9]) > LARGEST and epsilon_rdp(*mechanism) > LARGEST:  # few are as good a bound
        return f"the PRV accountant gives out for an epsilon as large as {LARGEST:g}"
    return ""


def _default_error(noise_multiplier: float, sample_rate: float, steps: int, delta: float) -> float:
    coarse, grid, coarse_error = _coarse(noise_multiplier, sample_rate, steps, delta)
    wanted = min(MAX_ERROR, RELATIVE_ERROR * max(coarse.estimate, 1e-6))
    return max(wanted, coarse_error * grid / MAX_GRID)


@functools.lru_cache(maxsize=32)
def _coarse(noise_multiplier: float, sample_rate: float, steps: int, delta: float) -> tuple[EpsilonBounds, int, float]:
    guess = gaussian_epsilon(delta, central_limit_mu(noise_multiplier, sample_rate, steps))
    error = COARSE * min(max(guess, 1e-3), 10.0)
    bounds, grid = _twice(noise_multiplier, sample_rate, steps, delta, error)
    return bounds, grid, error


def _twice(
    noise_multiplier: float, sample_rate: float, steps: int, delta: float, eps_error: float
) -> tuple[EpsilonBounds, int]:
    delta_error = delta / 1000.0
    try:
        return _compose(noise_multiplier, sample_rate, steps, delta, eps_error, delta_error)
    except COMPOSITION_FAILURES:
        # "Discrete mean differs significantly": a domain cut too short; a smaller δ error widens it.
        return _compose(noise_multiplier, sample_rate, steps, delta, eps_error, delta_error / 100.0)


def _compose(
    noise_multiplier: float, sample_rate: float, steps: int, delta: float, eps_error: float, delta_error: float
) -> tuple[EpsilonBounds, int]:
    from prv_accountant import PRVAccountant
    from prv_accountant.accountant import compute_safe_domain_size

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # log(0) at ρ = 1, and a reminder that eps_max must be safe: it is
        mechanism = _mechanism(noise_multiplier, sample_rate)
        half_width = compute_safe_domain_size([mechanism], [steps], eps_error, delta_error)
        # Theorem 5.5 of the paper: the mesh on which the composed error is eps_error is eps_error / per_mesh.
        per_mesh = math.sqrt(steps / 2 * math.log(12 / delta_error))
        eps_error, grid = _smooth_grid(half_width, max(eps_error, 2 * half_width * per_mesh / MAX_GRID), per_mesh)
        accountant = PRVAccountant(
            mechanism, max_self_compositions=steps, eps_error=eps_error, delta_error=delta_error, eps_max=half_width
        )
        bounds = accountant.compute_epsilon(delta, [steps])
    if not all(math.isfinite(bound) for bound in bounds):
        raise RuntimeError("the PRV accountant gave no finite epsilon")
    lower, estimate, upper = (max(0.0, bound) for bound in bounds)
    return EpsilonBounds(lower, estimate, upper), grid


@functools.lru_cache(maxsize=8)
def _mechanism(noise_multiplier: float, sample_rate: float) -> Any:
    """Return the mechanism with its Rényi curve remembered: sizing the domain asks for it again and again."""
    from prv_accountant import PoissonSubsampledGaussianMechanism

    mechanism = PoissonSubsampledGaussianMechanism(sampling_probability=sample_rate, noise_multiplier=noise_multiplier)
    mechanism.rdp = functools.cache(mechanism.rdp)
    return mechanism


def _smooth_grid(half_width: float, eps_error: float, per_mesh: float) -> tuple[float, int]:
    """Shrink ``eps_error`` until the grid's length has small prime factors only: the FFT is 10 to 20 times faster."""
    from scipy.fft import next_fast_len

    # The accountant's grid has 2·ceil(half_width / mesh) + 2 points.
    points = 2 * math.ceil(half_width * per_mesh / eps_error) + 2
    while (points := next_fast_len(points, real=True)) % 2:
        points += 1
    return half_width * per_mesh / (points / 2 - 1.5), points


def _stand_in(noise_multiplier: float, sample_rate: float, steps: int, delta: float, reason: str) -> EpsilonBounds:

    bounds = epsilon_pld_bounds(noise_multiplier, sample_rate, steps, delta)
    return EpsilonBounds(bounds.lower, bounds.estimate, bounds.upper, f"by the PLD accountant, since {reason}")
