"""Bounds in closed form, for the ends of the ranges: so little noise, or so much, that composition gives out."""

import math

from groupwise.privacy.accounting import EpsilonBounds, check_mechanism
from groupwise.privacy.gaussian import central_limit_mu, gaussian_epsilon

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
