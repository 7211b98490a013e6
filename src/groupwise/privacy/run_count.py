"""Holds the laws of the number of runs of an accounted search, and draws it from secret randomness.

The laws are those of Papernot and Steinke (ICLR 2022, arXiv 2110.03620): Definition 1, and Poisson (Theorem 6). What a
search with such a number of runs costs is in :mod:`groupwise.privacy.tuning`.
"""

from __future__ import annotations

import math
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from decimal import Decimal, localcontext

from groupwise.errors import UserError

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
