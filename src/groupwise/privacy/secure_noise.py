"""Cryptographically secure noise, added on a lattice so that a sum's lowest bits reveal nothing (`noise.secure`)."""

import hashlib
import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from groupwise.errors import UserError
from groupwise.privacy.sampling import PoissonSampler

CHUNK = 1 << 15
"""Entries per chunk. Each chunk has its own key. torch adds so few entries in one thread."""
LATTICE_BITS = 40


class Keystream:
    """The output of ChaCha20 under a key of 32 bytes, from its start. Use each key for one purpose only."""

    def __init__(self, key: bytes) -> None:
        try:
            from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
        except ImportError as error:
            raise UserError(
                "noise.secure=true needs the package cryptography: run pip install cryptography."
            ) from error
        self._encryptor = Cipher(algorithms.ChaCha20(key, bytes(16)), mode=None).encryptor()

    def words(self, count: int) -> np.ndarray:
        """Return the next ``count`` words, uint64 of shape (count,)."""
        return np.frombuffer(self._encryptor.update(bytes(8 * count)), dtype="<u8")

    def normals(self, count: int) -> np.ndarray:
        """Return ``count`` draws of N(0, 1), float64: a sign bit, and the inverse CDF at 63 bits of (0, ½)."""
        from scipy.special import ndtri

        words = self.words(count)
        draws = ndtri(((words >> np.uint64(1)).astype(np.float64) + 0.5) * 2.0**-64)
        return np.negative(draws, out=draws, where=(words & np.uint64(1)).astype(bool))


def add_on_lattice(digest: bytes, chunk: int, parts: Sequence[Tensor], stds: Sequence[float]) -> None:
    """Add N(0, std²) in place to chunk number ``chunk`` of a release, each part on the lattice of its std.

    The sum and the noise are each rounded to a multiple of the spacing g and then added exactly; the result is rounded
    to the tensor's dtype last. Rounding a Gaussian to multiples of g commutes with adding a multiple of g. So the
    release is a post-processing of the real-valued mechanism on rounded sums, and every multiple of g is possible
    whatever the sum. Rounding may move two neighbouring sums apart by g in each of D coordinates, so the noise
    multiplier is smaller by a factor of at most 1 + σ√D·2⁻⁴⁰.
    """
    stream = Keystream(hashlib.sha256(digest + chunk.to_bytes(8, "big")).digest())
    for part, std in zip(parts, stds, strict=True):
        spacing = lattice_spacing(std)
        draws = stream.normals(2 * part.numel())
        steps = np.rint((draws[::2] + draws[1::2]) * (std / math.sqrt(2.0) / spacing))
        noise = torch.from_numpy(steps * spacing).to(part.device)
        part.copy_((part.double() / spacing).round_().mul_(spacing).add_(noise))


def lattice_spacing(std: float) -> float:
    """Return g, the power of two in (std·2⁻⁴¹, std·2⁻⁴⁰]."""
    return math.ldexp(1.0, math.frexp(std)[1] - 1 - LATTICE_BITS)


class SecurePoissonSampler(PoissonSampler):
    """A Poisson sampler that draws by ChaCha20: an example is in the batch if its 64-bit word is below ρ·2⁶⁴."""

    def __init__(self, dataset_size: int, sample_rate: float, key: bytes) -> None:
        super().__init__(dataset_size, sample_rate, key)
        self._key = key

    def indices(self, step: int) -> np.ndarray:
        """Return the examples of step ``step``, int64 (n,), sorted; n may be 0. A pure function of (key, step)."""
        place = b"groupwise secure poisson\0" + int(step).to_bytes(8, "big")
        words = Keystream(hashlib.sha256(place + self._key).digest()).words(self.dataset_size)
        bound = int(self.sample_rate * 2.0**64)  # exact: ρ has 53 bits
        if not bound:
            return np.zeros(0, dtype=np.int64)
        return np.flatnonzero(words <= np.uint64(bound - 1)).astype(np.int64, copy=False)
