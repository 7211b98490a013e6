"""Bounds what a search costs that runs a random number of private trainings and releases the best one alone.

N. Papernot and T. Steinke, "Hyperparameter Tuning with Rényi Differential Privacy", ICLR 2022 (arXiv 2110.03620):
draw K; K times draw one of the grid's settings uniformly, train, and score; release the best of the K triples (setting,
model, score) and nothing else, K included. Its laws of K are here, truncated negative binomial (Definition 1) and
Poisson (Theorem 6). Q is the law of one triple on the data, Q' on a neighbouring data set.

Q's curve. The setting J is drawn without looking at the data, and M_J is the training under it. With n settings,
exp((λ-1)·D_λ(Q‖Q')) = (1/n)·Σ_j exp((λ-1)·D_λ(M_j‖M'_j)): a mean is at most its largest term, so at every order λ the
maximum over settings of their RDP is RDP of Q. The score is a function of the model and of examples that the guarantee
does not cover: post-processing. Noisy counts of adaptive thresholds are inside of M_j's σ (`calibration.split_noise`).

Any law of K (the paper's Lemma 7). Let f(x) = Σ_k Pr[K = k]·x^k, and give each triple y an independent uniform tag
u, so that pairs (y, u) are ordered without ties. With q = Pr[pair of Q < (y, u)], the best of K pairs has the density
Σ_k Pr[K = k]·k·q^(k-1) = f'(q) with respect to that of Q. The same under Q' with q', of the same event. Hence

    ∫ A^λ·A'^(1-λ) ≤ exp((λ-1)·D_λ(Q‖Q')) · max f'(q)^λ·f'(q')^(1-λ),                                             (1)

over all pairs (q, q') of probabilities of one event; K = 0 adds f(0), as then nothing is released in both worlds.
Runs are exchangeable, so the first of equal scores has the law of the one with the largest tag.

Truncated negative binomial (Theorem 2). f'(x) = E[K]·(γ/(1 - (1-γ)x))^(1+η). With a = γ + (1-γ)(1-q), a
probability again (of a post-processing), and a' likewise, f'(q)^λ·f'(q')^(1-λ) = E[K]·γ^(1+η)·((a'/a)^(λ-1)/a)^(1+η).
If Q' and Q are (λ̂, ε̂)-RDP, one event alone gives a'^λ̂·a^(1-λ̂) ≤ exp((λ̂-1)·ε̂), that is
a' ≤ a^(1-1/λ̂)·exp((1-1/λ̂)·ε̂). So (a'/a)^(λ-1)/a ≤ a^(-1-(λ-1)/λ̂)·exp((λ-1)(1-1/λ̂)·ε̂), and a ≥ γ. In (1),

    ε' = ε + (1+η)·(1-1/λ̂)·ε̂ + (1+η)·log(1/γ)/λ̂ + log E[K]/(λ-1)      for every λ̂ ≥ 1.                          (2)

Poisson (Theorem 6). f'(x) = μ·exp(μ(x-1)). If Q', Q are (ε̂, δ̂)-DP, 1-q' ≤ exp(ε̂)(1-q) + δ̂, so that
λq - (λ-1)q' - 1 ≤ (1-q)·((λ-1)·exp(ε̂) - λ) + (λ-1)·δ̂, whose first term is not positive if ε̂ ≤ log(1 + 1/(λ-1)). In (1),

    exp((λ-1)·ε') = exp(-μ) + μ·exp((λ-1)·(ε + μδ̂)).                                                              (3)

exp(-μ) is K = 0; dp_accounting, which has (2) and (3) for one mechanism and η ≥ 0, leaves it out. Both directions of D
are needed, and covered: RDP of the sampled Gaussian holds for adding and for removing an example (Mironov et al. 2019).

    python -m groupwise.privacy.tuning --noise-multiplier 0.8 --sample-rate 0.015 --steps 1315 --delta 1e-5 --grid 27
"""

from __future__ import annotations

import argparse
import math
import secrets
import sys
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal, localcontext

import numpy as np
from numpy.typing import NDArray

from groupwise.errors import UserError, command
from groupwise.privacy.accountants import COMPOSITION_FAILURES, ORDERS, check_mechanism, rdp_of_steps, training_event
from groupwise.privacy.accounting import epsilon_bounds
from groupwise.privacy.calibration import calibrate

LEAST_GAMMA, MOST_ETA, MOST_RUNS = 1e-6, 1e3, 1e5
BITS, DIGITS = 256, 80
"""Of the uniform number that K is drawn by, and of the probabilities that it is held against."""


class RunCount(ABC):
    """A law of K, the number of runs, that does not look at the data."""

    @property
    @abstractmethod
    def mean(self) -> float:
        """E[K]."""

    @property
    @abstractmethod
    def told(self) -> str:
        """The law in words."""

    @abstractmethod
    def probabilities(self) -> Iterator[tuple[int, Decimal]]:
        """(k, Pr[K = k]) for k from the smallest on, in the digits of the context."""

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


@dataclass(frozen=True)
class TruncatedNegativeBinomial(RunCount):
    """K ≥ 1 of shape η > -1 and 0 < γ < 1; η = 1 is the geometric law, η = 0 the logarithmic one.

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
        _check_mean(mean, 1.0)
        most = cls(eta, LEAST_GAMMA).mean
        if most < mean:
            raise UserError(
                f"{mean:g} runs are to be expected, and at eta = {eta:g} at most {most:.4g} can be: give fewer, or a "
                "larger eta."
            )
        low, high = 0.0, -math.log(LEAST_GAMMA)
        for _ in range(100):
            middle = 0.5 * (low + high)
            low, high = (middle, high) if _mean(eta, middle) < mean else (low, middle)
        return cls(eta, max(math.exp(-high), LEAST_GAMMA))

    @property
    def mean(self) -> float:
        """E[K]."""
        return _mean(self.eta, -math.log(self.gamma))

    @property
    def told(self) -> str:
        """The law in words."""
        return f"truncated negative binomial, eta = {self.eta:g}, gamma = {self.gamma:.4g}"

    def probabilities(self) -> Iterator[tuple[int, Decimal]]:
        """From k = 1 on, each from the one before: Pr[k+1]/Pr[k] = (1-γ)(k+η)/(k+1)."""
        eta, gamma = Decimal(self.eta), Decimal(self.gamma)
        scale = eta / ((-eta * gamma.ln()).exp() - 1) if eta else -1 / gamma.ln()
        k, probability = 1, (1 - gamma) * scale
        while True:
            yield k, probability
            probability *= (1 - gamma) * (k + eta) / (k + 1)
            k += 1


@dataclass(frozen=True)
class Poisson(RunCount):
    """K ≥ 0 with Pr[K = k] = exp(-μ)·μ^k/k!; nothing is released where it is 0."""

    mu: float

    def __post_init__(self) -> None:
        _check_mean(self.mu, 0.0)

    @property
    def mean(self) -> float:
        """E[K]."""
        return self.mu

    @property
    def told(self) -> str:
        """The law in words."""
        return f"Poisson, mean {self.mu:g}"

    def probabilities(self) -> Iterator[tuple[int, Decimal]]:
        """From k = 0 on."""
        k, probability = 0, (-Decimal(self.mu)).exp()
        while True:
            yield k, probability
            k += 1
            probability *= Decimal(self.mu) / k


def _mean(eta: float, cost: float) -> float:
    """E[K] for γ = exp(-cost), without a loss of digits near η = 0 or γ = 1."""
    x = eta * cost
    return math.expm1(cost) / cost * (x / -math.expm1(-x) if x else 1.0) if cost else 1.0


def _check_mean(mean: float, least: float) -> None:
    if not least < mean <= MOST_RUNS:
        raise UserError(f"{mean:g} runs are to be expected; give a number above {least:g}, and at most {MOST_RUNS:g}.")


Curve = NDArray[np.float64]
"""RDP at each of `ORDERS`, inf where none is known."""
LAMBDA: Curve = np.array(ORDERS, dtype=np.float64)
TOLERANCE = 3e-3
LEAST_SHARE = 0.01
"""Of a search's ε: less than that for a run is as good as unreachable."""


@dataclass(frozen=True)
class Training:
    """One setting's mechanism: T Poisson samples at rate ρ, each released once at σ (thresholds' counts included)."""

    noise_multiplier: float
    sample_rate: float
    steps: int


def rdp_curve(trainings: Sequence[Training]) -> Curve:
    """RDP of a training under a setting that is drawn at random: at each order the largest of the settings' own."""
    return np.max([_one_curve(training) for training in set(trainings)], axis=0)


def _one_curve(training: Training) -> Curve:
    return rdp_of_steps(training.noise_multiplier, training.sample_rate, training.steps)


def curve_epsilon(curve: Curve, delta: float) -> float:
    """ε at δ of a curve (Canonne, Kamath and Steinke 2020, Proposition 12); inf where no order is finite."""
    from dp_accounting import rdp

    return float(rdp.compute_epsilon(ORDERS, curve, delta)[0])


def search_curve(curve: Curve, count: RunCount) -> Curve:
    """RDP of the best of K outputs of a mechanism that has this curve in both directions.

    Equation (2) at the best λ̂ of `ORDERS` or λ̂ = 1; or (3), at each λ with the largest ε̂ that it allows and the δ̂ that
    the curve has there.
    """
    if isinstance(count, TruncatedNegativeBinomial):
        cost = -math.log(count.gamma)
        best = min(cost, float(np.min((1.0 - 1.0 / LAMBDA) * curve + cost / LAMBDA)))
        return _falling(curve + (1.0 + count.eta) * best + math.log(count.mean) / (LAMBDA - 1.0))
    if not isinstance(count, Poisson):
        raise TypeError(f"no bound is known here for {type(count).__name__}")
    from dp_accounting.rdp.rdp_privacy_accountant import compute_delta

    largest = np.log1p(1.0 / (LAMBDA - 1.0))
    deltas = np.array([compute_delta(ORDERS, curve, float(epsilon))[0] for epsilon in largest])
    moments = math.log(count.mu) + (LAMBDA - 1.0) * (curve + count.mu * deltas)
    return _falling(np.logaddexp(-count.mu, moments) / (LAMBDA - 1.0))


def _falling(curve: Curve) -> Curve:
    """What holds at an order holds below it, as D_λ grows with λ."""
    return np.maximum(np.minimum.accumulate(curve[::-1])[::-1], 0.0)


@dataclass(frozen=True)
class SearchCost:
    """Upper bounds on ε at one δ, for adding or removing one training example.

    Args:
        one_run: of the costliest setting's training alone, chosen without a look at results.
        grid: of one training under each setting, all looked at (composition).
        search: of the best of K.
        curve: RDP of the search.
    """

    one_run: float
    grid: float
    search: float
    curve: Curve


def search_cost(trainings: Sequence[Training], count: RunCount, delta: float, accountant: str = "prv") -> SearchCost:
    """What a search over these settings, one for each, costs; one run and the grid by `accountant`, the search by RDP.

    Formal guarantee: let each training be T Gaussian releases of Poisson samples as in
    :func:`~groupwise.privacy.accounting.epsilon_bounds`, K ~ `count`, settings uniform and independent, and the best
    triple by a score of outside data be all that is seen. Then that release is (``search``, ``delta``)-DP. Raises
    :class:`UserError` for a mechanism without a finite ε.
    """
    for training in trainings:
        check_mechanism(training.noise_multiplier, training.sample_rate, training.steps, delta)
    each = [(t.noise_multiplier, t.sample_rate, t.steps) for t in set(trainings)]
    one_run = max(epsilon_bounds(*mechanism, delta, accountant).upper for mechanism in each)
    curve = search_curve(rdp_curve(trainings), count)
    search = curve_epsilon(curve, delta)
    if not math.isfinite(search):
        raise UserError(f"no finite epsilon can be shown for this search at delta = {delta:g}: give more noise.")
    return SearchCost(one_run, grid_epsilon(trainings, delta, accountant), search, curve)


def grid_epsilon(trainings: Sequence[Training], delta: float, accountant: str = "prv") -> float:
    """ε of all these trainings together, by `accountant` if one mechanism makes them all, else by PLD."""
    steps: Counter[tuple[float, float]] = Counter()
    for training in trainings:
        steps[training.noise_multiplier, training.sample_rate] += int(training.steps)
    if len(steps) == 1:
        [((sigma, rate), total)] = steps.items()
        return epsilon_bounds(sigma, rate, total, delta, accountant).upper
    by_rdp = curve_epsilon(np.sum([_one_curve(Training(*of, total)) for of, total in steps.items()], axis=0), delta)
    import dp_accounting
    from dp_accounting import pld

    few = min(1e-3, 1e-3 * by_rdp / steps.total())  # of few steps: see accountants._interval
    interval = max(1e-4, few, min(1e-6 * by_rdp**2, 1e-4 * by_rdp))
    try:
        ledger = pld.PLDAccountant(dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE, interval)
        for of, total in steps.items():
            ledger.compose(training_event(*of), total)
        return min(by_rdp, float(ledger.get_epsilon(delta)))
    except COMPOSITION_FAILURES:
        return by_rdp


def calibrate_search(
    rates: Sequence[tuple[float, int]], count: RunCount, epsilon: float, delta: float
) -> tuple[float, ...]:
    """σ for each setting's (ρ, T), so that the whole search is (`epsilon`, `delta`)-DP and at most 0.3 % below.

    Each setting's run alone gets the same ε by RDP, so that none pays for another: the curve that counts is their
    maximum. Raises :class:`UserError` for a target that no noise reaches, as the random choice alone costs more.
    """
    if not (math.isfinite(epsilon) and epsilon > 0.0):
        raise UserError(f"epsilon is {epsilon}; give the search a finite target above 0.")
    least = curve_epsilon(search_curve(np.zeros_like(LAMBDA), count), delta)
    low, high = 0.0, epsilon  # of one run; a search costs no less
    one_run = 0.5 * epsilon
    for _ in range(40):
        if least >= epsilon or one_run < LEAST_SHARE * epsilon:
            break
        found = {of: calibrate(one_run, delta, *of, "rdp").noise_multiplier for of in set(rates)}
        value = curve_epsilon(search_curve(rdp_curve([Training(found[of], *of) for of in found]), count), delta)
        if (1.0 - TOLERANCE) * epsilon <= value <= epsilon:
            return tuple(found[of] for of in rates)
        low, high = (low, one_run) if value > epsilon else (one_run, high)
        one_run *= (1.0 - 0.5 * TOLERANCE) * epsilon / value  # a search's ε grows about as its runs' does
        if not low < one_run < high:
            one_run = 0.5 * (low + high)
    raise UserError(
        f"epsilon = {epsilon:g} cannot be reached: choosing the best of {count.mean:g} expected runs is shown to cost "
        f"{least:.3g} at delta = {delta:g} whatever the noise; give a larger one, or expect fewer runs."
    )


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Print the three figures of a grid whose settings share one mechanism; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m groupwise.privacy.tuning", description=str(__doc__).split("\n")[0])
    parser.add_argument("--noise-multiplier", type=float, help="sigma of each run; or give --epsilon")
    parser.add_argument("--epsilon", type=float, help="of the whole search, from which sigma follows")
    parser.add_argument("--sample-rate", type=float, required=True, help="rho = B/N")
    parser.add_argument("--steps", type=int, required=True, help="T of each run")
    parser.add_argument("--delta", type=float, default=1e-5)
    parser.add_argument("--grid", type=int, required=True, help="how many settings there are")
    parser.add_argument("--expected", type=float, help="E[K], the runs to expect (default: as many as settings)")
    parser.add_argument("--eta", type=float, default=0.0, help="shape of the truncated negative binomial, above -1")
    parser.add_argument("--poisson", action="store_true", help="K is Poisson instead")
    given = parser.parse_args(arguments)
    if (given.epsilon is None) == (given.noise_multiplier is None) or given.grid < 1:
        raise UserError("give one of --noise-multiplier and --epsilon, and a --grid of at least 1 setting.")
    expected = float(given.grid) if given.expected is None else given.expected
    count = Poisson(expected) if given.poisson else TruncatedNegativeBinomial.with_mean(given.eta, expected)
    sigma, rate = given.noise_multiplier, (given.sample_rate, given.steps)
    if sigma is None:
        [sigma] = calibrate_search([rate], count, given.epsilon, given.delta)
    cost = search_cost([Training(sigma, *rate)] * given.grid, count, given.delta)
    print(f"sigma = {sigma:.4f}, {expected:g} runs expected ({count.told}), delta = {given.delta:g}")
    for name, value in (("one run", cost.one_run), (f"all {given.grid} runs", cost.grid), ("search", cost.search)):
        print(f"  {name:12} epsilon = {value:.4g}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
