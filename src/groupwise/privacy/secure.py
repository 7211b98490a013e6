"""Draws for who trusts neither statistical generators nor floating-point Gaussians (`noise.secure=true`).

Two measures, both opt-in, both pure functions of a 32-byte key:

- Bits come from the ChaCha20 cipher (pyca/cryptography), so that whoever sees some of them learns nothing of the rest.
- Gaussian noise is added on a lattice. The sum and the noise are each rounded to multiples of g, a power of two of
  about std·2⁻⁴⁰, before they meet. What leaves is then a function of (sum/g + whole number), and every whole number can
  come out of every sum: the pattern of low bits that tells candidates apart (Mironov 2012; Jin et al. 2022) is gone.
  A draw is the sum of two normals (Holohan & Braghin 2021, arXiv 2107.10138), each by inverse CDF from 64 bits.

What the lattice costs: rounding moves neighbouring sums apart by at most g in each of D coordinates, so that the noise
multiplier is smaller by the factor 1 + σ√D·2⁻⁴⁰ at most, 1e-7 for σ = 10 and a hundred million parameters.
What stays: each normal ends at ±9.1 std and has the 53 bits of a float64.
"""

import hashlib
import math

import numpy as np
import torch
from scipy.special import ndtri

from groupwise.errors import UserError
from groupwise.privacy.sampling import PoissonSampler

CHUNK = 1 << 16
_LATTICE_BITS = 40
_SMALLEST = 1e-200


class Keystream:
    """The words of ChaCha20 under a key of 32 bytes, from the first on; one key serves one purpose."""

    def __init__(self, key: bytes) -> None:
        try:
            from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
        except ImportError as error:
            raise UserError(
                "noise.secure=true needs the package cryptography: pip install cryptography, or leave it out."
            ) from error
        self._encryptor = Cipher(algorithms.ChaCha20(key, bytes(16)), mode=None).encryptor()

    def words(self, count: int) -> np.ndarray:
        """Return the next ``count`` words, uint64 of shape (count,)."""
        return np.frombuffer(self._encryptor.update(bytes(8 * count)), dtype="<u8")

    def normals(self, count: int) -> np.ndarray:
        """Return ``count`` draws of N(0, 1), float64: a sign bit, and the inverse CDF at 63 bits of (0, ½)."""
        words = self.words(count)
        draws = ndtri(((words >> np.uint64(1)).astype(np.float64) + 0.5) * 2.0**-64)
        return np.negative(draws, out=draws, where=(words & np.uint64(1)).astype(bool))


class LatticeNoise:
    """Adds N(0, ``std``²) to one tensor, part by part, on the lattice of its std.

    Raises:
        UserError: ``std`` is below 1e-200, where the lattice would leave the float64 numbers.
    """

    def __init__(self, key: bytes, std: float) -> None:
        if std < _SMALLEST:
            raise UserError(f"noise.secure=true was asked for noise of std {std}; give at least {_SMALLEST:g}.")
        self._stream = Keystream(key)
        self._spacing = lattice_spacing(std)
        self._scale = std / math.sqrt(2.0) / self._spacing

    def add_(self, part: torch.Tensor) -> None:
        """Noise the next ``part``, in place; the one rounding to its dtype comes last, after the noise."""
        draws = self._stream.normals(2 * part.numel())  # an entry's two lie side by side, so parts of any size agree
        steps = np.rint((draws[::2] + draws[1::2]) * self._scale)
        noise = torch.from_numpy(steps * self._spacing).view(part.shape).to(part.device)
        part.copy_((part.double() / self._spacing).round_().mul_(self._spacing).add_(noise))


def lattice_spacing(std: float) -> float:
    """Return g, the power of two in (std·2⁻⁴¹, std·2⁻⁴⁰]."""
    return math.ldexp(1.0, math.frexp(std)[1] - 1 - _LATTICE_BITS)


class SecurePoissonSampler(PoissonSampler):
    """A Poisson sampler whose draws are words of ChaCha20: an example is in when its word is below ρ·2⁶⁴."""

    def __init__(self, dataset_size: int, sample_rate: float, key: bytes) -> None:
        super().__init__(dataset_size, sample_rate, key)
        self._key = key

    def indices(self, step: int) -> np.ndarray:
        """Return step ``step``'s examples, int64, sorted, possibly none: a pure function of (key, step)."""
        place = b"groupwise secure poisson\0" + int(step).to_bytes(8, "big")
        words = Keystream(hashlib.sha256(place + self._key).digest()).words(self.dataset_size)
        bound = int(self.sample_rate * 2.0**64)  # exact: ρ has 53 bits
        return np.flatnonzero(words <= np.uint64(bound - 1)).astype(np.int64, copy=False)
