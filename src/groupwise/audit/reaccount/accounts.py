"""Computes ε from the record's numbers alone, by accountants that the run did not use."""

import math
from typing import Any

import numpy as np
from scipy.optimize import brentq, minimize_scalar
from scipy.special import expit, logsumexp

from groupwise.audit.reaccount.record import CannotTell, Disagrees, Record, same

LOOSE = 1e-3
"""By how much, relatively, a figure may lie below the bracket's lower end: PRV's is off by 1e-4 where ε is near 80."""
TIGHT = 1e-6
"""By how much ε may lie above the bound that is claimed: the error of the figure that it is compared with."""


def claim(record: Record) -> str:
    """The quoted ε is the bound of the plan's accountant, at the plan's δ, and within the target."""
    plan, spent = record.plan, record.json("privacy")["spent"]
    same(spent, {"delta": plan["delta"], "accountant": plan["accountant"]}, "spent", "the plan")
    bound = {"prv": spent["prv"]["upper"], "pld": spent["pld"], "rdp": spent["rdp"]}[plan["accountant"]]
    if plan["accountant"] == "pld" and bound is None:
        raise Disagrees("the accountant is pld, and spent.pld is empty")
    same(spent, {"epsilon": bound}, "spent", f"its own {plan['accountant']} bound")
    epsilon = float(spent["epsilon"])
    if epsilon > plan["epsilon"] * (1.0 + TIGHT):
        raise Disagrees(f"spent {epsilon:.6g} is more than the target {plan['epsilon']:.6g}")
    if not float(spent["prv"]["lower"]) <= float(spent["prv"]["estimate"]) <= float(spent["prv"]["upper"]):
        raise Disagrees("spent.prv is no bracket: lower <= estimate <= upper does not hold")
    return f"epsilon {epsilon:.4f} by {plan['accountant']}, target {plan['epsilon']:.4f}"


def another_library(record: Record) -> str:
    """The accountant of another library, called with the numbers of privacy.json: its bracket meets the claimed one."""
    given = _numbers(record)
    spent = record.json("privacy")["spent"]
    other = "prv_accountant" if record.plan["accountant"] == "pld" or spent["prv"]["note"] else "dp_accounting PLD"
    try:
        lower, upper = _prv(**given) if other == "prv_accountant" else _pld(**given)
    except (RuntimeError, AssertionError, MemoryError) as error:
        raise CannotTell(f"{other} gave no answer ({str(error).splitlines()[0]})") from error
    low, high = _bracket(spent, record.plan["accountant"])
    words = f"{other} has {lower:.4f} to {upper:.4f}, the record {low:.4f} to {high:.4f}"
    if lower > high * (1.0 + TIGHT) or upper < low * (1.0 - LOOSE):
        raise Disagrees(words)
    return words


def own_integral(record: Record) -> str:
    """ε by a Fourier integral, without an accountant's code: inside the claimed bracket."""
    try:
        epsilon = epsilon_fourier(**_numbers(record))
    except ArithmeticError as error:
        raise CannotTell(str(error)) from error
    spent = record.json("privacy")["spent"]
    low, high = _bracket(spent, record.plan["accountant"])
    words = f"the integral has {epsilon:.4f}, the record {low:.4f} to {high:.4f}"
    if not low * (1.0 - LOOSE) <= epsilon <= high * (1.0 + TIGHT) or epsilon > float(spent["rdp"]) * (1.0 + TIGHT):
        raise Disagrees(words)
    return words


def _numbers(record: Record) -> dict[str, Any]:
    plan, executed = record.plan, record.json("privacy")["executed_steps"]
    if plan["noise_multiplier"] == 0.0 or executed == 0:
        if executed and math.isfinite(float(record.json("privacy")["spent"]["epsilon"])):
            raise Disagrees("no noise was added, and the epsilon that is quoted is finite")
        raise CannotTell("no noise was added, so there is no epsilon to work out")
    rate = plan["expected_batch_size"] / plan["dataset_size"]
    if not (plan["noise_multiplier"] > 0.0 and 0.0 < rate <= 1.0 and 0.0 < plan["delta"] < 1.0 and executed > 0):
        raise Disagrees("the plan's numbers are no mechanism: a sigma, a rate or a delta is out of its range")
    return {
        "noise_multiplier": plan["noise_multiplier"],
        "sample_rate": rate,
        "steps": int(executed),
        "delta": plan["delta"],
    }


def _bracket(spent: dict[str, Any], accountant: str) -> tuple[float, float]:
    """The interval in which the record claims ε to lie; RDP and PLD give only an upper end."""
    return float(spent["prv"]["lower"]), float(spent["prv"]["upper"] if accountant == "prv" else spent["epsilon"])


def _pld(noise_multiplier: float, sample_rate: float, steps: int, delta: float) -> tuple[float, float]:
    from dp_accounting.pld import privacy_loss_distribution

    coarse = 0.0
    for interval in (1e-2, 1e-4):  # a first, rough figure says how finely ε is to be resolved
        few = min(1e-3, 1e-3 * coarse / steps)  # of few steps this moves an end by a thousandth at most
        interval = max(interval, few, min(1e-6 * coarse**2, 1e-4 * coarse))
        ends = []
        for pessimistic in (False, True):
            release = privacy_loss_distribution.from_gaussian_mechanism(
                noise_multiplier,
                sampling_prob=sample_rate,
                value_discretization_interval=interval,
                pessimistic_estimate=pessimistic,
                use_connect_dots=pessimistic,
            )
            ends.append(float(release.self_compose(steps).get_epsilon_for_delta(delta)))
        coarse = ends[1]
    return ends[0], ends[1]


def _prv(noise_multiplier: float, sample_rate: float, steps: int, delta: float) -> tuple[float, float]:
    import warnings

    from prv_accountant import PoissonSubsampledGaussianMechanism, PRVAccountant

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        accountant = PRVAccountant(
            PoissonSubsampledGaussianMechanism(sampling_probability=sample_rate, noise_multiplier=noise_multiplier),
            max_self_compositions=steps,
            eps_error=0.02,
            delta_error=delta / 1000.0,
        )
        lower, _, upper = accountant.compute_epsilon(delta, [steps])
    return float(lower), float(upper)


WIDTH = 12.0
"""Standard deviations of every Gaussian tail that is integrated over; beyond lies 1e-32."""
POINTS = 1 << 12
"""Along the line, at most."""
SETTLED = 1e-6
"""The relative change of ε, when w is halved, that is let pass."""
GONE = 1e-11
"""Of the integrand at its peak: where it stays below that, the rest is left out."""
_BLOCK = 256


def epsilon_fourier(noise_multiplier: float, sample_rate: float, steps: int, delta: float) -> float:
    """Return ε at ``delta`` of ``steps`` releases, the larger of removing and adding one example; 0 where δ suffices.

    Raises:
        ArithmeticError: the integral did not settle.
    """
    removing = _Losses(noise_multiplier, sample_rate, steps, removing=True).epsilon(delta)
    adding = _Losses(noise_multiplier, sample_rate, steps, removing=False)
    return removing if adding.renyi(delta)[1] <= removing else max(removing, adding.epsilon(delta))


class _Losses:
    """The loss of T releases when an example is removed, or added: ±log((1 - ρ) + ρ·exp((2x - 1)/2σ²))."""

    def __init__(self, sigma: float, rate: float, steps: int, removing: bool) -> None:
        self.sigma, self.steps, self.removing = sigma, steps, removing
        self.log_rate, self.log_rest = math.log(rate), math.log1p(-rate) if rate < 1.0 else -math.inf

    def log_moment(self, z: np.ndarray, fastest: float = 0.0) -> np.ndarray:
        """Return log E[exp(zL)] for z (n,) with one real part; ``fastest`` is the largest imaginary part."""
        powers = z + 1.0 if self.removing else -z  # of the ratio of densities, under N(0, σ²)
        tilt = float(powers[0].real)
        low = (0.0 if self.removing else self._mode(tilt)) - WIDTH * self.sigma
        high = max(0.0, tilt) + WIDTH * self.sigma
        spacing = 2.5 / (fastest / self.sigma**2 + WIDTH / self.sigma)  # the integrand's highest frequency, with room
        x = np.linspace(low, high, 2 + math.ceil((high - low) / spacing))
        ratio = np.logaddexp(self.log_rest, self.log_rate + (2.0 * x - 1.0) / (2.0 * self.sigma**2))
        density = -0.5 * (x / self.sigma) ** 2 + math.log((x[1] - x[0]) / (self.sigma * math.sqrt(2.0 * math.pi)))
        rows = max(1, (1 << 21) // len(x))
        parts = (powers[start : start + rows, None] for start in range(0, len(powers), rows))
        return np.concatenate([logsumexp(density + part * ratio, axis=1) for part in parts])

    def renyi(self, delta: float) -> tuple[float, float]:
        """Return the order t of the best bound E[exp(tL)]^T = δ·exp(tε), and that ε."""

        def bound(log_t: float) -> float:
            t = math.exp(log_t)
            return (self.steps * float(self.log_moment(np.array([t]))[0]) - math.log(delta)) / t

        found = minimize_scalar(
            bound, bounds=(math.log(1e-2), math.log(1e3)), method="bounded", options={"xatol": 0.01}
        )
        return math.exp(found.x), float(found.fun)

    def epsilon(self, delta: float) -> float:
        """Return ε at ``delta``; raises ArithmeticError where the integral does not settle."""
        t, highest = self.renyi(delta)
        scale = self.steps * float(self.log_moment(np.array([t]))[0])
        h = 1e-3 * t
        below, above = (self.steps * float(self.log_moment(np.array([t + side]))[0]) for side in (-h, h))
        spread = math.sqrt(max(below - 2.0 * scale + above, 1e-12 * h**2)) / h  # of the loss, tilted
        step, width, before = min(t / 5.0, 0.125 / spread), 0.2 * min(spread, 1.0 / self.sigma), math.inf
        while True:
            found = self._solve(t, step, scale, width, delta, highest)
            if abs(found - before) <= SETTLED * found:
                return found
            before, width = found, width / 2.0

    def _solve(self, t: float, step: float, scale: float, width: float, delta: float, highest: float) -> float:
        """ε from points on Re z = t that are ``step`` apart, given log E[exp(tL)]^T = scale."""
        z, weights = self._line(t, step, scale, width)

        def excess(epsilon: float) -> float:
            return float((weights * np.exp(scale - z * epsilon)).real.sum()) / delta - 1.0

        return float(brentq(excess, 0.0, highest, xtol=1e-10)) if excess(0.0) > 0.0 else 0.0

    def _line(self, t: float, step: float, scale: float, width: float) -> tuple[np.ndarray, np.ndarray]:
        """Points z, and weights such that δ(ε) is the real part of Σ weight·exp(scale - zε)."""
        points, weights = [], []
        for start in range(0, POINTS, _BLOCK):
            s = step * np.arange(start, start + _BLOCK)
            z, u = t + 1j * s, 0.5 * (width * s) ** 2
            window = np.exp(-u) * (1.0 + u + u**2 / 2.0 + u**3 / 6.0)
            power = np.exp(self.steps * self.log_moment(z, fastest=float(s[-1])) - scale) * window
            points.append(z)
            weights.append(power / (z * (z + 1.0)) * step / math.pi)
            if np.abs(power[-16:]).max() < GONE:
                weights[0][0] *= 0.5
                return np.concatenate(points), np.concatenate(weights)
        raise ArithmeticError(f"the integral did not settle in {POINTS} points")

    def _mode(self, tilt: float) -> float:
        """Where the integrand of a negative power is largest; it falls off as a Gaussian of std σ or less."""

        def slope(x: float) -> float:
            odds = self.log_rate - self.log_rest + (2.0 * x - 1.0) / (2.0 * self.sigma**2)
            return x - tilt * float(expit(odds))

        return float(brentq(slope, tilt - 1.0, 0.0))
