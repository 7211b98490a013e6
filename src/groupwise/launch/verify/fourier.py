"""ε by an integral of our own, that shares no code and no method with the accountants of the two libraries.

The privacy loss L of one Poisson-subsampled Gaussian release has the generating function E[exp(zL)], a one-dimensional
integral. That of T releases is its T-th power, and the δ that belongs to ε is one more integral, along a line
Re z = t > 0 of the complex plane (the Laplace transform of x ↦ (1 - exp(-x))₊ is 1/(z(z + 1)); as in the saddle-point
accountant of Alghamdi et al. 2022):

    δ(ε) = 1/π ∫₀^∞ Re[ E[exp(zL)]^T · exp(-zε) / (z(z + 1)) ] ds,    z = t + is.

No loss is rounded to a grid, and both integrals are trapezoids of analytic functions, which converge geometrically. The
steps in which the example was not drawn have almost no loss, so the integrand would die out slowly; it is multiplied by
a window that smooths the loss by a width w, with seven vanishing moments, and w is halved until ε stays as it is.
"""

import math

import numpy as np
from scipy.optimize import brentq, minimize_scalar
from scipy.special import expit, logsumexp

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
