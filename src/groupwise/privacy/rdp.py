"""ε by Rényi DP: the classical accountant, looser than PRV by 4 to 10 % of σ, kept for comparison with older work."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from groupwise.privacy.accounting import check_mechanism

# Tenths below 11 matter for ε above 1; the long tail for small ε, whose best order is far above 64.
ORDERS = (
    *(1.0 + tenth / 10.0 for tenth in range(1, 100)),
    *range(11, 64),
    *range(64, 256, 8),
    *range(256, 1025, 64),
)


MOST_NOISE = 1e5
"""Of σ/ρ. Above it the rounding of a sum near 1 swallows what one step costs, about ρ²α/2σ², and may show less than
nothing; more noise costs no more than this much."""


def epsilon_rdp(noise_multiplier: float, sample_rate: float, steps: int, delta: float) -> float:
    """Return an upper bound on ε at ``delta`` by Rényi DP (Mironov, Talwar & Zhang 2019), add/remove adjacency.

    The guarantee is that of :func:`~groupwise.privacy.accounting.epsilon_bounds`; any finite set of orders is valid.
    """
    check_mechanism(noise_multiplier, sample_rate, steps, delta)
    from dp_accounting import rdp

    from groupwise.privacy.pld import training_event

    noise_multiplier = min(noise_multiplier, MOST_NOISE * sample_rate)
    accountant = rdp.RdpAccountant(orders=ORDERS)
    with _orders_left_out_in_silence():
        accountant.compose(training_event(noise_multiplier, sample_rate), int(steps))
    return float(accountant.get_epsilon(delta))


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
