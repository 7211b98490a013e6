"""Draws Gaussian noise once, so that it can be replayed: a pure function of (key, step, stream).

Threat model. The noise hides an example from whoever sees the released parameters and thresholds, as long as the key
stays secret: whoever holds the key can subtract the noise. Checkpoints hold the key, so publish exported weights, not
checkpoints. Replaying a step after a crash adds the very same noise, so a resumed run releases nothing new; that holds
as long as the sums are the same too, so never use one key for two runs, or publish a step and its replay both.

By default the generators are statistical ones, seeded through SHA-256 (with 128 bits on the CPU, 64 on other devices),
and attacks on floating-point Gaussians (Mironov 2012; Jin et al. 2022) are not defended against. ``secure=True``
answers both (:mod:`groupwise.privacy.secure`). Side channels are no goal of either.
"""

import hashlib
import math
import os
from collections.abc import Callable
from typing import Any, Self

import numpy as np
import torch

from groupwise.errors import UserError

COUNT_STREAM = -1
"""Stream of the noise on the clip counts; parameters use streams 0, 1, 2, …"""

# The whole extra memory: noise is drawn into one scratch buffer of this many entries.
_CHUNK = 1 << 16
_DEVICE_CHUNK = 1 << 24

_Add = Callable[[torch.Tensor], object]
"""Adds the next draws to a part of a tensor, in place."""


class NoiseSource:
    """A secret key, and the noise that it stands for.

    Make one with :meth:`fresh` (OS entropy), :meth:`from_key` (resume) or :meth:`from_seed` (debugging: the noise can
    be predicted, ``is_secret`` is False and the run is not private). Processes that hold the same key draw the same
    noise: replicas (DDP) stay equal and noise is added once; owners of different shards take a :meth:`child` each.

    ``secure`` draws from a cipher and adds on a lattice, on the CPU: for the same key another noise, of the same law.
    """

    def __init__(self, key: bytes, is_secret: bool, secure: bool = False) -> None:
        if not isinstance(key, bytes) or len(key) < 16:
            raise UserError("the noise key is shorter than 16 bytes; make one with NoiseSource.fresh().")
        self.key = key
        self.is_secret = is_secret
        self.secure = secure

    @classmethod
    def fresh(cls, secure: bool = False) -> Self:
        """Return a source with 256 bits of the operating system's entropy."""
        return cls(os.urandom(32), True, secure)

    @classmethod
    def from_key(cls, key: bytes, is_secret: bool = True, secure: bool = False) -> Self:
        """Return the source of a key kept from before (at least 16 bytes); pass on what else it had."""
        return cls(key, is_secret, secure)

    @classmethod
    def from_seed(cls, seed: int, secure: bool = False) -> Self:
        """Return a predictable source for debugging and tests: no privacy guarantee holds for what it noises."""
        return cls(hashlib.sha256(b"groupwise debug seed %d" % seed).digest(), False, secure)

    def __repr__(self) -> str:
        """Never the key: a log or a traceback may show this."""
        return f"NoiseSource(is_secret={self.is_secret}, secure={self.secure})"

    def child(self, purpose: str) -> Self:
        """Return a source of the same kind whose noise is independent of this one's: a stage's, or a shard's."""
        return type(self)(self.derive(purpose), self.is_secret, self.secure)

    def derive(self, purpose: str) -> bytes:
        """Return a 32-byte key for another secret draw, such as the Poisson sampler's; it tells nothing of this key."""
        return hashlib.sha256(b"groupwise derived\0" + purpose.encode() + b"\0" + self.key).digest()

    def add_gaussian_(self, tensor: torch.Tensor, std: float, step: int, stream: int) -> torch.Tensor:
        """Add N(0, ``std``²) to every entry of ``tensor``, in place, and return it.

        The noise is float64 for a float64 tensor, float32 for a float32 one, independent between entries, steps and
        streams, and on the CPU the same whatever the tensor's memory layout. One (step, stream) serves one tensor only:
        used twice, the noises are equal and the guarantee is lost. Raises :class:`UserError` for a narrower dtype (its
        rounding is wider than the noise's law allows for), a distributed tensor, or a ``std`` that is negative or not
        finite.
        """
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            raise UserError(f"noise was asked for on a {type(tensor).__name__}; give this rank's local torch.Tensor.")
        if tensor.dtype not in (torch.float32, torch.float64):
            raise UserError(f"noise was asked for on {tensor.dtype}; convert the summed gradient to float32 first.")
        if not 0.0 <= std < math.inf:
            raise UserError(f"the noise's std is {std}; give a finite number of at least 0.")
        if std > 0.0 and tensor.numel():
            add, chunk = self._adder(tensor, std, step, stream)
            with torch.no_grad():
                _in_chunks(tensor, add, chunk)
        return tensor

    def _adder(self, tensor: torch.Tensor, std: float, step: int, stream: int) -> tuple[_Add, int]:
        digest = self._digest(step, stream)
        if self.secure:
            from groupwise.privacy.secure import CHUNK, LatticeNoise

            return LatticeNoise(digest, std).add_, CHUNK
        draw, chunk = _cpu_draw(tensor, digest) if tensor.device.type == "cpu" else _device_draw(tensor, digest)
        return lambda part: part.add_(draw(part.numel()).view(part.shape), alpha=std), chunk

    def _digest(self, step: int, stream: int) -> bytes:
        place = int(step).to_bytes(8, "big", signed=True) + int(stream).to_bytes(8, "big", signed=True)
        return hashlib.sha256(b"groupwise noise\0" + place + self.key).digest()


def _cpu_draw(like: torch.Tensor, digest: bytes) -> tuple[Callable[[int], torch.Tensor], int]:
    # SFC64 is a quarter faster here than Philox, and numpy seeds it with 128 bits of the hash; torch's own CPU
    # generator is twice as fast still in float32 but keeps only 32 bits of its seed, few enough to try them all.
    generator = np.random.Generator(np.random.SFC64(int.from_bytes(digest, "big")))
    dtype: Any = np.float32 if like.dtype == torch.float32 else np.float64
    scratch: Any = np.empty(min(_CHUNK, like.numel()), dtype)
    shared = torch.from_numpy(scratch)

    def draw(count: int) -> torch.Tensor:
        generator.standard_normal(out=scratch[:count], dtype=dtype)
        return shared[:count]

    return draw, len(scratch)


def _device_draw(like: torch.Tensor, digest: bytes) -> tuple[Callable[[int], torch.Tensor], int]:
    generator = torch.Generator(like.device)
    generator.manual_seed(int.from_bytes(digest[:8], "big", signed=True))
    scratch = torch.empty(min(_DEVICE_CHUNK, like.numel()), dtype=like.dtype, device=like.device)
    return lambda count: scratch[:count].normal_(generator=generator), scratch.numel()


def _in_chunks(tensor: torch.Tensor, add: _Add, chunk: int) -> None:
    """Give ``add`` the tensor's parts in row-major order, so that a layout (channels_last) changes nothing."""
    if tensor.is_contiguous():
        flat = tensor.view(-1)
        for start in range(0, flat.numel(), chunk):
            add(flat[start : start + chunk])
    elif tensor.numel() <= chunk:
        add(tensor)
    else:
        rows = max(1, chunk * len(tensor) // tensor.numel())
        for start in range(0, len(tensor), rows):
            part = tensor[start : start + rows]
            _in_chunks(part[0] if len(part) == 1 else part, add, chunk)
