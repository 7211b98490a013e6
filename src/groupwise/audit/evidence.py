"""What one step's release says of each canary: the logarithm of a likelihood ratio, in the batch or not."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Evidence:
    """A number for each canary that is N(0, a) without it and N(a, a) with it, at unit noise.

    Args:
        found: (m,). power: a, (m,).
    """

    found: Floats
    power: Floats

    def __add__(self, other: "Evidence") -> "Evidence":
        """Both together, independent."""
        return Evidence(self.found + other.found, self.power + other.power)


def in_gradients(released: list[Floats], own: list[Floats], stds: list[float]) -> Evidence:
    """From noisy clipped sums: Σ_k ⟨released, own⟩/std_k², one entry a parameter.

    Args:
        released: what came out, (m, d) by canary. own: each canary's clipped gradient, (m, d). stds: of the noise.
    """
    found = sum((u * v).sum(1) / std**2 for u, v, std in zip(released, own, stds, strict=True))
    power = sum((v * v).sum(1) / std**2 for v, std in zip(own, stds, strict=True))
    return Evidence(np.asarray(found, dtype=np.float64), np.asarray(power, dtype=np.float64))


def in_counts(released: Floats, bits: Floats, std: float, chance: float) -> Evidence:
    """From noisy centred counts, in which all canaries meet: the others are noise of a known covariance.

    Args:
        released: Σ_i (b_k - ½) + noise, (K,). bits: each canary's b_k - ½, (m, K). std: σ_b.
        chance: that a canary is in the batch.
    """
    spread = chance * (1.0 - chance)
    covariance = std**2 * np.eye(bits.shape[1]) + spread * bits.T @ bits
    weights = np.linalg.solve(covariance, bits.T).T  # (m, K)
    with_itself = (weights * bits).sum(1)
    others = np.maximum(1.0 - spread * with_itself, 1e-12)  # Sherman-Morrison: take the canary's own share out again
    centre = released - chance * bits.sum(0)
    return Evidence((weights @ centre + chance * with_itself) / others, with_itself / others)


def log_ratio(evidence: Evidence, sample_rate: float) -> Floats:
    """log of (density with the canary in the data) / (density without), (m,); it is drawn at ``sample_rate``."""
    drawn = evidence.found - 0.5 * evidence.power
    if sample_rate >= 1.0:
        return drawn
    return np.logaddexp(np.log1p(-sample_rate), np.log(sample_rate) + drawn)
