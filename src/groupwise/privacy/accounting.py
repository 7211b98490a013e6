"""Bounds ε of T Poisson-subsampled Gaussian releases by a chosen accountant: PRV (Gopi et al. 2021), PLD or RDP."""

import contextlib
import functools
import math
import warnings
from typing import Any

import numpy as np

from groupwise.errors import UserError
from groupwise.privacy.accountants import (
    COMPOSITION_FAILURES,
    FEW_ORDERS,
    MOST_NOISE,
    EpsilonBounds,
    central_limit_mu,
    check_mechanism,
    epsilon_pld,
    epsilon_rdp,
    gaussian_epsilon,
    rdp_of_steps,
)

ACCOUNTANTS = ("prv", "pld", "rdp")
SMALLEST_DELTA, MOST_STEPS = 1e-12, 1e7
"""Below this δ the rounding of Fourier transforms, about 1e-16, may affect PRV and PLD. Above this many steps both are
very slow. RDP is then used instead, and also if PLD fails, as for an ε of a million."""
SMALLEST, LARGEST, LARGEST_DELTA = 0.04, 50.0, 0.01
"""The range of ε and δ for PRV. Outside this range PLD is used, which is as tight."""
RELATIVE_ERROR, MAX_ERROR = 2e-3, 1e-2
"""The half-width of PRV's bracket is this share of ε, and at most MAX_ERROR, so that large ε are as tight as in the
published tables. It is wider if the grid would need more than MAX_GRID points."""
MAX_GRID = 2**21
COARSE = 0.03
"""The same share for a first estimate, whose error is still only about 0.01 %."""


def epsilon_bounds(
    noise_multiplier: float, sample_rate: float, steps: int, delta: float, accountant: str = "prv"
) -> EpsilonBounds:
    """Bound ε at ``delta`` for ``steps`` compositions of the Poisson-subsampled Gaussian mechanism.

    Formal guarantee: let each of T steps draw every example independently with probability ρ (``sample_rate``),
    sum vectors so that one example moves the sum by at most 1 in ℓ2, and add N(0, σ²I) with σ = ``noise_multiplier``.
    Then all T outputs together are (``upper``, ``delta``)-DP when one example is added or removed.
    Covered: choices in later steps that depend on earlier outputs. Not covered: shuffled or fixed-size batches,
    replacing an example, and floating-point attacks on the noise. Only PRV has a lower bound; the others return 0.
    Raises :class:`UserError` for an unknown accountant or an argument outside its range.
    """
    check_accountant(accountant)
    check_mechanism(noise_multiplier, sample_rate, steps, delta)
    return _composed(min(noise_multiplier, MOST_NOISE), sample_rate, int(steps), delta, accountant)


def check_accountant(accountant: str) -> None:
    """Raise a :class:`UserError` for an unknown accountant."""
    if accountant not in ACCOUNTANTS:
        raise UserError(f"accountant is {accountant!r}; choose one of {', '.join(ACCOUNTANTS)}.")


@functools.lru_cache(maxsize=128)  # calibration, plan and the finished run need the same ε
def _composed(noise_multiplier: float, sample_rate: float, steps: int, delta: float, accountant: str) -> EpsilonBounds:
    mechanism = (noise_multiplier, sample_rate, steps, delta)
    if accountant == "rdp":
        return _upper(epsilon_rdp(*mechanism))
    name = accountant.upper()
    if delta < SMALLEST_DELTA:
        reason = f"delta is below {SMALLEST_DELTA:g}, too small for the rounding errors of the {name} accountant"
    elif steps > MOST_STEPS:
        reason = f"the {name} accountant is too slow for more than {MOST_STEPS:g} steps"
    else:
        try:
            return epsilon_prv(*mechanism) if accountant == "prv" else _upper(epsilon_pld(*mechanism))
        except COMPOSITION_FAILURES:
            reason = f"the {name} accountant fails its own checks for these numbers"
    return _upper(epsilon_rdp(*mechanism), f"by the RDP accountant, since {reason}")


def _upper(bound: float, note: str = "") -> EpsilonBounds:
    return EpsilonBounds(0.0, bound, bound, note)


def epsilon_prv(noise_multiplier: float, sample_rate: float, steps: int, delta: float) -> EpsilonBounds:
    """Bracket ε at ``delta`` with the PRV accountant; ``upper`` is the guarantee.

    The guarantee is that of :func:`~groupwise.privacy.accounting.epsilon_bounds`. The half-width of the bracket is
    0.2 % of ε, at most 0.01. The δ error is δ/1000. Only the losses of removing an example are composed. That adding an
    example costs no more is proven for one step. For the paper's settings the PLD accountant, which composes both,
    confirms it for all steps. If the PRV accountant fails its own checks, or ε or δ is outside its range, the PLD
    accountant is used, and ``note`` says so.
    """
    mechanism = (noise_multiplier, sample_rate, int(steps), delta)
    reason = _out_of_reach(*mechanism)
    if not reason:
        try:
            share = RELATIVE_ERROR * max(_coarse(*mechanism).estimate, 1e-6)
            return _compose(*mechanism, min(MAX_ERROR, share))
        except COMPOSITION_FAILURES:  # little noise at a high rate: cifar at scale=smoke, sst2 at scale=demo
            reason = "no grid of the PRV accountant passes its own checks for these numbers"
    return _upper(epsilon_pld(*mechanism), f"by the PLD accountant, since {reason}")


def estimate_prv(noise_multiplier: float, sample_rate: float, steps: int, delta: float) -> float:
    """Return an estimate of ε, not a bound, from a coarse grid; its error is about 0.01 %, and it takes about 50 ms."""
    mechanism = (noise_multiplier, sample_rate, int(steps), delta)
    if not _out_of_reach(*mechanism):
        with contextlib.suppress(*COMPOSITION_FAILURES):
            return _coarse(*mechanism).estimate
    return epsilon_pld(*mechanism)


def _out_of_reach(noise_multiplier: float, sample_rate: float, steps: int, delta: float) -> str:
    """Why ε or δ is outside PRV's range; empty if it is inside."""
    if delta > LARGEST_DELTA:
        return f"the PRV accountant fails for a delta above {LARGEST_DELTA:g}"
    if gaussian_epsilon(delta, central_limit_mu(noise_multiplier, sample_rate, steps)) < SMALLEST:
        return f"the PRV accountant is less tight for an epsilon below {SMALLEST:g}"
    if epsilon_rdp(noise_multiplier, sample_rate, steps, delta, FEW_ORDERS) > LARGEST:
        return f"the PRV accountant fails for an epsilon above {LARGEST:g}"
    return ""


@functools.lru_cache(maxsize=32)
def _coarse(noise_multiplier: float, sample_rate: float, steps: int, delta: float) -> EpsilonBounds:
    mechanism = (noise_multiplier, sample_rate, steps, delta)
    return _compose(*mechanism, COARSE * min(epsilon_rdp(*mechanism, FEW_ORDERS), 10.0))


def _compose(noise_multiplier: float, sample_rate: float, steps: int, delta: float, eps_error: float) -> EpsilonBounds:
    """Compose on a grid over [-L, L] with errors of at most ``eps_error`` and δ/1000 (Theorem 5.5 of Gopi et al.)."""
    from prv_accountant import PRVAccountant

    delta_error = delta / 1000.0
    tail = _tail(noise_multiplier, sample_rate, steps, delta_error)
    per_mesh = math.sqrt(steps / 2 * math.log(12 / delta_error))  # the error of a mesh of width 1
    half_width = tail + max(eps_error, 2 * (tail + eps_error) * per_mesh / MAX_GRID)
    eps_error = _smooth_grid(half_width, half_width - tail, per_mesh)
    with warnings.catch_warnings(action="ignore"):  # it warns that eps_max must be safe, which half_width is
        accountant = PRVAccountant(
            _loss(noise_multiplier, sample_rate),
            max_self_compositions=steps, eps_error=eps_error, delta_error=delta_error, eps_max=half_width,
        )  # fmt: skip
        bounds = accountant.compute_epsilon(delta, [steps])
    if not all(math.isfinite(bound) for bound in bounds):
        raise RuntimeError("the PRV accountant gave no finite epsilon")
    lower, estimate, upper = (max(0.0, bound) for bound in bounds)
    return EpsilonBounds(lower, estimate, upper)


def _tail(noise_multiplier: float, sample_rate: float, steps: int, delta_error: float) -> float:
    """Return L such that |loss| > L with probability at most δ_err/3 for all steps together, and δ_err/6T for one step.

    Theorem 5.5 of Gopi et al. needs this. Truncating any of the T losses to [-L, L] has an effect with probability at
    most δ_err/6. Their sum, without rounding errors, is outside [-L, L] with probability at most δ_err/3. The rounding
    error is above ``eps_error`` with probability at most δ_err/6 (Hoeffding). The library's own L, from δ(ε), is larger
    by 2. Here L follows from RDP: Pr[loss ≥ t] ≤ exp((α-1)(D_α - t)), and Pr[loss ≤ -t] is no larger, since D_α bounds
    both directions.
    """
    curve, orders = rdp_of_steps(noise_multiplier, sample_rate, 1, FEW_ORDERS), np.array(FEW_ORDERS)
    events = ((steps, delta_error / 3), (1, delta_error / (6 * steps)))
    return max(float(np.min(count * curve + math.log(2 / chance) / (orders - 1))) for count, chance in events)


@functools.lru_cache(maxsize=8)
def _loss(noise_multiplier: float, sample_rate: float) -> Any:
    """Return the library's privacy loss of one step, with a CDF that takes a fifth of the time.

    Pr[loss ≤ t] = ρΦ(σz - 1/2σ) + (1-ρ)Φ(σz + 1/2σ) with z = log(1 + (exp(t) - 1)/ρ). For an output x of variance σ²
    and mean 0 or 1, z = (2x - 1)/2σ² is the loss without sampling.
    """
    from prv_accountant import PoissonSubsampledGaussianMechanism
    from scipy.special import erfc

    class Loss(PoissonSubsampledGaussianMechanism):
        def cdf(self, t: Any) -> Any:
            """Pr[loss ≤ t], from its complement in long double, for accuracy in the upper tail."""
            with np.errstate(all="ignore"):
                z = np.log1p(np.expm1(np.asarray(t, dtype=np.float64)) / sample_rate)  # NaN below the smallest loss
            drawn, not_drawn = (erfc((noise_multiplier * z + shift) / math.sqrt(2.0)) for shift in (-half, half))
            rate = np.longdouble(sample_rate)
            return np.where(np.isnan(z), 0, 1 - (rate * drawn + (1 - rate) * not_drawn) / 2)

        def probability(self, a: Any, b: Any) -> Any:
            """Probabilities of adjacent cells: the end of one is the start of the next."""
            return np.diff(self.cdf(np.append(a, b[-1:])))

    half = 0.5 / noise_multiplier
    return Loss(sampling_probability=sample_rate, noise_multiplier=noise_multiplier)


def _smooth_grid(half_width: float, eps_error: float, per_mesh: float) -> float:
    """Reduce ``eps_error`` until the grid's length has only small prime factors: the FFT is 10 to 20 times faster."""
    from scipy.fft import next_fast_len

    # The accountant's grid has 2·ceil(half_width / mesh) + 2 points.
    points = 2 * math.ceil(half_width * per_mesh / eps_error) + 2
    while (points := next_fast_len(points, real=True)) % 2:
        points += 1
    return half_width * per_mesh / (points / 2 - 1.5)
