"""ε by privacy loss distributions (dp_accounting): a second opinion on PRV, and what stands in when PRV gives up."""

from __future__ import annotations

from typing import Any

from groupwise.privacy.accounting import EpsilonBounds, check_mechanism

_INTERVAL = 1e-4


def training_event(noise_multiplier: float, sample_rate: float) -> Any:
    """Return one DP-SGD step as a ``dp_accounting`` event: a Gaussian release inside a Poisson sample."""
    import dp_accounting

    return dp_accounting.PoissonSampledDpEvent(sample_rate, dp_accounting.GaussianDpEvent(noise_multiplier))


def epsilon_pld(
    noise_multiplier: float, sample_rate: float, steps: int, delta: float, *, interval: float = _INTERVAL
) -> float:
    """Return an upper bound on ε at ``delta``, from privacy losses rounded pessimistically to ``interval``.

    The guarantee is that of :func:`~groupwise.privacy.accounting.epsilon_bounds`; both directions (one example added,
    one removed) are composed and the worse is taken. A smaller ``interval`` is tighter and slower.
    """
    check_mechanism(noise_multiplier, sample_rate, steps, delta)
    import dp_accounting
    from dp_accounting import pld

    accountant = pld.PLDAccountant(
        dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE, value_discretization_interval=interval
    )
    accountant.compose(training_event(noise_multiplier, sample_rate), int(steps))
    return float(accountant.get_epsilon(delta))


def epsilon_pld_bounds(noise_multiplier: float, sample_rate: float, steps: int, delta: float) -> EpsilonBounds:
    """Bracket ε at ``delta`` between losses rounded optimistically and pessimistically."""
    upper = epsilon_pld(noise_multiplier, sample_rate, steps, delta)
    from dp_accounting.pld import privacy_loss_distribution

    optimistic = privacy_loss_distribution.from_gaussian_mechanism(
        noise_multiplier,
        sampling_prob=sample_rate,
        value_discretization_interval=_INTERVAL,
        pessimistic_estimate=False,
        use_connect_dots=False,
    )
    lower = float(optimistic.self_compose(int(steps)).get_epsilon_for_delta(delta))
    return EpsilonBounds(min(lower, upper), upper, upper)
