"""Closed forms of the Gaussian mechanism, and the central-limit picture of DP-SGD (no guarantee in the latter)."""

import math


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
