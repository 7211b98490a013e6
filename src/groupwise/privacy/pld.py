"""ε by privacy loss distributions (dp_accounting): a second opinion on PRV, and what stands in when PRV gives up."""

import math
from typing import Any

from groupwise.privacy.accounting import EpsilonBounds, check_mechanism
from groupwise.privacy.gaussian import central_limit_mu

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
    """Return how finely to round losses: 1e-4 up to ε = 10, then 1e-6·ε², at last 1e-4·ε, to bound time and memory; and
    up to ε = 10 a small part of the spread of one step's losses, and of all steps' together, where it is less."""
    from groupwise.privacy.rdp import epsilon_rdp

    epsilon = epsilon_rdp(noise_multiplier, sample_rate, steps, delta)
    if epsilon > 10.0:
        return max(_INTERVAL, min(1e-6 * epsilon**2, 1e-4 * epsilon))
    spread = central_limit_mu(noise_multiplier, sample_rate, steps)
    usual = _INTERVAL if delta <= 0.01 else 10.0 * _INTERVAL  # such a δ goes with widely spread losses
    return min(usual, spread * max(1e-5, min(1e-3, 0.1 / math.sqrt(steps))))
