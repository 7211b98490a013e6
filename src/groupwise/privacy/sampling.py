"""Samples the batch of a step: by Poisson sampling, which the accounting assumes, or shuffled, without a guarantee."""

import hashlib

import numpy as np

from groupwise.privacy.cpu_noise import bits_of


class PoissonSampler:
    """Draws every example independently with probability ρ (``sample_rate``) in each step.

    Formal guarantee: this is the sampling that :func:`~groupwise.privacy.accounting.epsilon_bounds` accounts for. The
    size of a batch is random, Binomial(N, ρ). It may be 0, which is still a step. It is private, so divide by the
    configured B instead. Amplification by sampling requires that the draw is secret: pass
    ``NoiseSource.derive("sampling")`` as ``seed``. An int makes the draw reproducible; do not publish it with the
    model.
    """

    def __init__(self, dataset_size: int, sample_rate: float, seed: int | bytes) -> None:
        self.dataset_size = dataset_size
        self.sample_rate = sample_rate
        self._seed = seed

    def indices(self, step: int) -> np.ndarray:
        """Return the examples of step ``step``, int64 (n,), sorted; n may be 0. A pure function of (seed, step)."""
        uniform = _generator(self._seed, "poisson", step).random(self.dataset_size)
        return np.flatnonzero(uniform < self.sample_rate).astype(np.int64, copy=False)


class ShuffleSampler:
    """Splits a new permutation of the data into batches of ``batch_size`` in each epoch; the last may be smaller.

    No guarantee: such batches are often accounted for as Poisson samples, but can leak several times the claimed ε
    (Chua et al. 2024; Annamalai et al. 2024). Use this only to reproduce published runs; ε is then "as published".
    """

    def __init__(self, dataset_size: int, batch_size: int, seed: int | bytes) -> None:
        self.dataset_size = dataset_size
        self.batch_size = batch_size
        self.steps_per_epoch = -(-dataset_size // batch_size)
        self._seed = seed

    def indices(self, step: int) -> np.ndarray:
        """Return the examples of step ``step``, int64 (n,), sorted. A pure function of (seed, step)."""
        epoch, place = divmod(int(step), self.steps_per_epoch)
        order = _generator(self._seed, "shuffle", epoch).permutation(self.dataset_size)
        return np.sort(order[place * self.batch_size : (place + 1) * self.batch_size])


def _generator(seed: int | bytes, purpose: str, place: int) -> np.random.Generator:
    secret = seed if isinstance(seed, bytes) else str(int(seed)).encode()
    digest = hashlib.sha256(f"groupwise {purpose} {int(place)}\0".encode() + secret).digest()
    return np.random.Generator(bits_of(digest))
