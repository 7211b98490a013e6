"""Bounds ε of the best of K trainings, where K is drawn at random and the best model alone is released.

N. Papernot and T. Steinke, "Hyperparameter Tuning with Rényi Differential Privacy", ICLR 2022 (arXiv 2110.03620).
"""

import math

from groupwise.errors import UserError
from groupwise.privacy.accountants import check_mechanism, curve_epsilon, rdp_of_event, training_event

MOST_RUNS = 1e5
"""Runs that may be expected."""


def logseries_argument(runs: float) -> float:
    """Return p of numpy's ``Generator.logseries(p)``, whose mean is ``runs``.

    Raises :class:`UserError` unless 1 < ``runs`` <= `MOST_RUNS`.
    """
    from scipy.optimize import brentq

    if not 1.0 < runs <= MOST_RUNS:
        raise UserError(f"runs is {runs:g}; give how many are expected, above 1 and at most {MOST_RUNS:g}.")
    return float(brentq(lambda p: -p / ((1.0 - p) * math.log1p(-p)) - runs, 1e-9, 1.0 - 1e-9, xtol=1e-12))


def best_run_epsilon(noise_multiplier: float, sample_rate: float, steps: int, delta: float, runs: float) -> float:
    """Return an upper bound on ε at ``delta`` of the best of K trainings, by Rényi DP (Theorem 2, η = 0).

    Formal guarantee: draw K once from numpy's ``logseries``, with mean ``runs``. Each of K trainings is T steps as in
    :func:`~groupwise.privacy.accounting.epsilon_bounds`, under settings that are drawn uniformly and independently.
    Then the settings and the model of the best score are (ε, ``delta``)-DP, if the score is of examples that ε does
    not cover, and nothing else is released, K included. Raises :class:`UserError` for arguments out of range.
    """
    from dp_accounting import SelfComposedDpEvent
    from dp_accounting.dp_event import RepeatAndSelectDpEvent

    check_mechanism(noise_multiplier, sample_rate, steps, delta)
    logseries_argument(runs)
    training = SelfComposedDpEvent(training_event(noise_multiplier, sample_rate), int(steps))
    return curve_epsilon(rdp_of_event(RepeatAndSelectDpEvent(training, runs, 0.0)), delta)
