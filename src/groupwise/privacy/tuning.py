"""Bounds what a search costs that runs a random number of private trainings and releases the best one alone.

N. Papernot and T. Steinke, "Hyperparameter Tuning with Rényi Differential Privacy", ICLR 2022 (arXiv 2110.03620):
draw K; K times draw one of the grid's settings uniformly, train, and score; release the best of the K triples (setting,
model, score) and nothing else, K included. Let Q be the law of one triple on the data, Q' on a neighbouring data set.

RDP of Q. The setting J is drawn without looking at the data, and M_J is the training under it. With n settings,
exp((λ-1)·D_λ(Q‖Q')) = (1/n)·Σ_j exp((λ-1)·D_λ(M_j‖M'_j)): a mean is at most its largest term, so at every order λ the
maximum over settings of their RDP is RDP of Q. The score is a function of the model and of examples that the guarantee
does not cover: post-processing. Noisy counts of adaptive thresholds are inside of M_j's σ (`calibration.split_noise`).
The first of equal scores wins; runs are exchangeable, so that is the law of ties broken at random.

RDP of the search. K is truncated negative binomial. Let Q be (λ, ε)-RDP in both directions (RDP of the sampled Gaussian
is: Mironov et al. 2019). By Theorem 2, for every (λ̂, ε̂) with λ̂ ≥ 1 of which Q is RDP as well:

    ε' = ε + (1+η)·(1-1/λ̂)·ε̂ + (1+η)·log(1/γ)/λ̂ + log E[K]/(λ-1).                                               (1)

dp_accounting's RepeatAndSelectDpEvent has it for one mechanism, not for the maximum of several.
"""

from __future__ import annotations

import contextlib
import math
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal, localcontext
from itertools import count
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from groupwise.errors import UserError
from groupwise.privacy.accountants import ORDERS, check_mechanism, curve_epsilon, rdp_of_steps
from groupwise.privacy.accounting import epsilon_bounds
from groupwise.privacy.calibration import calibrate, solve

LEAST_GAMMA, MOST_ETA, MOST_RUNS = 1e-6, 1e3, 1e5
BITS, DIGITS = 256, 80
"""Of the uniform number that K is drawn by, and of the probabilities that it is held against."""


@dataclass(frozen=True)
class TruncatedNegativeBinomial:
    """The law of the number of runs K ≥ 1, of shape η > -1 and 0 < γ < 1; η = 1 is geometric, η = 0 logarithmic.

    Pr[K = k] = (1-γ)^k/(γ^-η - 1)·∏_{l<k} (l+η)/(l+1), for η = 0 its limit (1-γ)^k/(k·log(1/γ)).
    E[K] = η(1-γ)/(γ(1-γ^η)), for η = 0 its limit (1/γ-1)/log(1/γ).
    """

    eta: float
    gamma: float

    def __post_init__(self) -> None:
        if not -1.0 < self.eta <= MOST_ETA:
            raise UserError(f"eta is {self.eta}; give a number above -1 and at most {MOST_ETA:g}, such as 0 or 1.")
        if not LEAST_GAMMA <= self.gamma < 1.0:
            raise UserError(f"gamma is {self.gamma:.3g}; give a number below 1, and at least {LEAST_GAMMA:g}.")

    @classmethod
    def with_mean(cls, eta: float, mean: float) -> TruncatedNegativeBinomial:
        """The law of that shape whose E[K] is `mean`; raises `UserError` where there is none."""
        from scipy.optimize import brentq

        most = cls(eta, LEAST_GAMMA).mean
        if not 1.0 < mean <= min(MOST_RUNS, most):
            raise UserError(
                f"{mean:g} runs are to be expected; give a number above 1, and at most {min(MOST_RUNS, most):.4g} "
                f"at eta = {eta:g}."
            )
        cost = brentq(lambda cost: _mean(eta, cost) - mean, 0.0, -math.log(LEAST_GAMMA), xtol=1e-300, rtol=1e-14)
        return cls(eta, max(math.exp(-cost), LEAST_GAMMA))

    @property
    def mean(self) -> float:
        """E[K]."""
        return _mean(self.eta, -math.log(self.gamma))

    def __str__(self) -> str:
        """The law in words."""
        return f"truncated negative binomial, eta = {self.eta:g}, gamma = {self.gamma:.4g}"

    def probabilities(self) -> Iterator[tuple[int, Decimal]]:
        """(k, Pr[K = k]) from k = 1 on, in the digits of the context: Pr[k+1]/Pr[k] = (1-γ)(k+η)/(k+1)."""
        eta, gamma = Decimal(self.eta), Decimal(self.gamma)
        probability = (1 - gamma) * (eta / ((-eta * gamma.ln()).exp() - 1) if eta else -1 / gamma.ln())
        for k in count(1):
            yield k, probability
            probability *= (1 - gamma) * (k + eta) / (k + 1)

    def draw(self, bits: Callable[[int], int] = secrets.randbits) -> int:
        """K, by inverting the distribution at a secret number of 256 bits from the operating system.

        A probability is off by less than 1e-70, where a float would make it 1e-16.
        """
        with localcontext(prec=DIGITS):
            number, below, least = Decimal(bits(BITS)) / 2**BITS, Decimal(0), Decimal(10) ** (5 - DIGITS)
            for k, probability in self.probabilities():
                below += probability
                if number < below or (probability < least and k > self.mean):
                    return k
        raise AssertionError("probabilities never end")


def _mean(eta: float, cost: float) -> float:
    """E[K] for γ = exp(-cost), without a loss of digits near η = 0 or γ = 1."""
    x = eta * cost
    return math.expm1(cost) / cost * (x / -math.expm1(-x) if x else 1.0) if cost else 1.0


Curve = NDArray[np.float64]
"""RDP at each of `ORDERS`, inf where none is known."""
LAMBDA: Curve = np.array(ORDERS, dtype=np.float64)
TOLERANCE = 3e-3


class Training(NamedTuple):
    """One setting's mechanism: T Poisson samples at rate ρ, each released once at σ (thresholds' counts included)."""

    noise_multiplier: float
    sample_rate: float
    steps: int


def rdp_curve(trainings: Sequence[Training]) -> Curve:
    """RDP of a training under a setting that is drawn at random: at each order the largest of the settings' own."""
    return np.max([rdp_of_steps(*training) for training in set(trainings)], axis=0)


def search_curve(curve: Curve, runs: TruncatedNegativeBinomial) -> Curve:
    """RDP of the best of K outputs of a mechanism that has this curve in both directions.

    Equation (1) at the best λ̂ of `ORDERS` or λ̂ = 1. What holds at an order holds below it, as D_λ grows with λ.
    """
    cost = -math.log(runs.gamma)
    best = min(cost, float(np.min((1.0 - 1.0 / LAMBDA) * curve + cost / LAMBDA)))
    of_search = curve + (1.0 + runs.eta) * best + math.log(runs.mean) / (LAMBDA - 1.0)
    return np.maximum(np.minimum.accumulate(of_search[::-1])[::-1], 0.0)


class SearchCost(NamedTuple):
    """Upper bounds on ε at one δ, for adding or removing one training example."""

    one_run: float
    """Of the costliest setting's training alone, chosen without a look at results."""
    grid: float
    """Of one training under each setting, all looked at (composition)."""
    search: float
    """Of the best of K."""


def search_cost(
    trainings: Sequence[Training], runs: TruncatedNegativeBinomial, delta: float, accountant: str = "prv"
) -> SearchCost:
    """The cost of a search over these settings, one run each; one run by `accountant`, grid and search by RDP.

    Formal guarantee: let each training be T Gaussian releases of Poisson samples as in
    :func:`~groupwise.privacy.accounting.epsilon_bounds`, K ~ `runs`, settings uniform and independent, and the best
    triple by a score of outside data be all that is seen. Then that release is (``search``, ``delta``)-DP. Raises
    :class:`UserError` for a mechanism without a finite ε.
    """
    for training in trainings:
        check_mechanism(*training, delta)
    one_run = max(epsilon_bounds(*training, delta, accountant).upper for training in set(trainings))
    search = curve_epsilon(search_curve(rdp_curve(trainings), runs), delta)
    if not math.isfinite(search):
        raise UserError(f"no finite epsilon can be shown for this search at delta = {delta:g}: give more noise.")
    grid = curve_epsilon(np.sum([rdp_of_steps(*training) for training in trainings], axis=0), delta)
    return SearchCost(one_run, grid, search)


def calibrate_search(
    rates: Sequence[tuple[float, int]], runs: TruncatedNegativeBinomial, epsilon: float, delta: float
) -> tuple[float, ...]:
    """σ for each setting's (ρ, T), so that the whole search is (`epsilon`, `delta`)-DP and at most 0.3 % below.

    Each setting's run alone gets the same ε by RDP, so that none pays for another: the curve that counts is their
    maximum. Raises :class:`UserError` for a target that no noise reaches, as the random choice alone costs more.
    """
    if not (math.isfinite(epsilon) and epsilon > 0.0):
        raise UserError(f"epsilon is {epsilon}; give the search a finite target above 0.")

    def sigmas(shares: float) -> dict[tuple[float, int], float]:
        """σ at which each setting's run alone costs 1/shares."""
        return {of: calibrate(1.0 / shares, delta, *of, "rdp").noise_multiplier for of in set(rates)}

    def search(shares: float) -> float:
        curve = rdp_curve([Training(sigma, *of) for of, sigma in sigmas(shares).items()])
        return curve_epsilon(search_curve(curve, runs), delta)

    least = curve_epsilon(search_curve(np.zeros_like(LAMBDA), runs), delta)
    if least < epsilon:
        with contextlib.suppress(UserError):  # from a run's share on that no noise reaches
            found = sigmas(solve(search, epsilon, 2.0 / epsilon, tolerance=TOLERANCE)[0])
            return tuple(found[of] for of in rates)
    raise UserError(
        f"epsilon = {epsilon:g} cannot be reached: choosing the best of {runs.mean:g} expected runs is shown to cost "
        f"{least:.3g} at delta = {delta:g} whatever the noise; give a larger one, or expect fewer runs."
    )
