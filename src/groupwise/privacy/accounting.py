"""Bounds ε of T Poisson-subsampled Gaussian releases, by the accountant that is asked for."""

import functools
import math

from groupwise.errors import UserError
from groupwise.privacy.accountants import COMPOSITION_FAILURES, EpsilonBounds, check_mechanism

ACCOUNTANTS = ("prv", "pld", "rdp")


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
    from groupwise.privacy.accountants import epsilon_revealed, nothing_shows

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


CLOSED_ABOVE, CLOSED_ALONE = 1e3, 1e5
"""From the first ε on the closed form may be the smallest bound; from the second on it is within a few percent of any
other, and the others lose their way."""
SMALLEST_DELTA, MOST_STEPS = 1e-12, 1e8
"""Below this δ the rounding of Fourier transforms, some 1e-16, may show in PRV and PLD; past these steps both crawl."""


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
        from groupwise.privacy.prv import epsilon_prv

        return epsilon_prv(noise_multiplier, sample_rate, steps, delta)
    elif accountant == "pld":
        from groupwise.privacy.accountants import epsilon_pld_bounds

        return epsilon_pld_bounds(noise_multiplier, sample_rate, steps, delta)
    from groupwise.privacy.accountants import epsilon_rdp

    upper = epsilon_rdp(noise_multiplier, sample_rate, steps, delta)
    return EpsilonBounds(0.0, upper, upper, reason and f"by the RDP accountant, since {reason}")


def check_accountant(accountant: str) -> None:
    """Refuse an unknown accountant; raises :class:`UserError`."""
    if accountant not in ACCOUNTANTS:
        raise UserError(f"accountant is {accountant!r}; choose one of {', '.join(ACCOUNTANTS)}.")
