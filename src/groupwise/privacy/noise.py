"""Draws Gaussian noise once, so that it can be replayed: a pure function of (key, step, stream); securely if asked."""

import hashlib
import math
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from operator import call
from typing import Any, Self

import numpy as np
import torch

from groupwise.errors import UserError
from groupwise.privacy import cpu_noise
from groupwise.privacy.counted_noise import CountedNoise, batches, chunk_on, few_on
from groupwise.privacy.sampling import PoissonSampler

COUNT_STREAM = -1
"""Stream of the noise on the clip counts; parameters use streams 0, 1, 2, …"""
WAYS = ("ziggurat", "pairs", "counted")
"""How noise is drawn that is not secure; see `NoiseSource`."""
ALONE = 1 << 18
"""Entries of a release that are not worth a second thread."""
_Add = Callable[[torch.Tensor], object]
"""Adds the next draws to a part of a tensor, and divides it, in place."""


class NoiseSource:
    """A secret key, and the noise that it stands for.

    Make one with :meth:`fresh` (OS entropy), :meth:`from_key` (resume) or :meth:`from_seed` (debugging: the noise can
    be predicted, ``is_secret`` is False and the run is not private). Processes that hold the same key draw the same
    noise: replicas (DDP) stay equal and noise is added once; owners of different shards take a :meth:`child` each.

    ``secure`` draws from a cipher and adds on a lattice, on the CPU: for the same key another noise, of the same law.
    Else ``drawn`` says how, one of `WAYS`: "counted" (`groupwise.privacy.counted_noise`) is the same on every device,
    "ziggurat" and "pairs" (`groupwise.privacy.cpu_noise`) draw on a CPU, wherever the tensor is; None counts for
    tensors that are not on a CPU, and else is "ziggurat". A run settles it as it begins (:meth:`settled`), and its
    checkpoint keeps it, so that replayed steps repeat their noise on any machine.
    """

    def __init__(self, key: bytes, is_secret: bool, secure: bool = False, drawn: str | None = None) -> None:
        if not isinstance(key, bytes) or len(key) < 16:
            raise UserError("the noise key is shorter than 16 bytes; make one with NoiseSource.fresh().")
        if drawn not in (None, *WAYS):
            raise UserError(f"drawn={drawn!r} is no way to draw noise: give {', '.join(WAYS)}, or None.")
        self.key = key
        self.is_secret = is_secret
        self.secure = secure
        self.drawn = drawn

    @classmethod
    def fresh(cls, secure: bool = False) -> Self:
        """Return a source with 256 bits of the operating system's entropy."""
        return cls(os.urandom(32), True, secure)

    @classmethod
    def from_key(cls, key: bytes, is_secret: bool = True, secure: bool = False, drawn: str | None = None) -> Self:
        """Return the source of a key kept from before (at least 16 bytes); pass on what else it had."""
        return cls(key, is_secret, secure, drawn)

    @classmethod
    def from_state(cls, state: Mapping[str, Any], secure: bool = False) -> Self:
        """Return the source that a checkpoint's ``noise_...`` entries tell of.

        Args:
            state: of a training. One of before ``noise_secure`` was ``secure``; one of before ``noise_drawn`` says in
                ``noise_counted`` whether noise was counted; one of before that ran on a CPU.
        """
        before = "counted" if state.get("noise_counted", False) else "ziggurat"
        secure, drawn = state.get("noise_secure", secure), state.get("noise_drawn", before)
        return cls(state["noise_key"], state["noise_is_secret"], secure, drawn)

    @classmethod
    def from_seed(cls, seed: int, secure: bool = False) -> Self:
        """Return a predictable source for debugging and tests: no privacy guarantee holds for what it noises."""
        return cls(hashlib.sha256(b"groupwise debug seed %d" % seed).digest(), False, secure)

    def __repr__(self) -> str:
        """Never the key: a log or a traceback may show this."""
        return f"NoiseSource(is_secret={self.is_secret}, secure={self.secure})"

    def child(self, purpose: str) -> Self:
        """Return a source of the same kind whose noise is independent of this one's: a stage's, or a shard's."""
        return type(self)(self.derive(purpose), self.is_secret, self.secure, self.drawn)

    def settled(self, device: torch.device, processes: int = 1) -> Self:
        """Return this source with ``drawn`` decided: as it is, or else by the device that a run begins on.

        On a CPU "pairs" where the key is secret and one process holds it, "ziggurat" where others draw the same.
        """
        on_cpu = "pairs" if self.is_secret and processes == 1 else "ziggurat"
        drawn = self.drawn or (on_cpu if device.type == "cpu" else "counted")
        return type(self)(self.key, self.is_secret, self.secure, drawn)

    def derive(self, purpose: str) -> bytes:
        """Return a 32-byte key for another secret draw, such as the Poisson sampler's; it tells nothing of this key."""
        return hashlib.sha256(b"groupwise derived\0" + purpose.encode() + b"\0" + self.key).digest()

    def add_gaussian_(self, tensor: torch.Tensor, std: float, step: int, stream: int) -> torch.Tensor:
        """Add N(0, ``std``²) to every entry of ``tensor`` in place, and return it.

        The noise is float64 for a float64 tensor, float32 for a float32 one, independent between entries, steps and
        streams, and the same whatever the tensor's memory layout. One (step, stream) serves one tensor only:
        used twice, the noises are equal and the guarantee is lost. Raises :class:`UserError` for a narrower dtype (its
        rounding is wider than the noise's law allows for), a distributed tensor, or a ``std`` that is negative or not
        finite.
        """
        for job in self._jobs(tensor, std, step, stream, 1.0, None):
            job()
        return tensor

    def add_gaussians_(
        self, tensors: Sequence[torch.Tensor], stds: Sequence[float], step: int, divisor: float = 1.0
    ) -> None:
        """:meth:`add_gaussian_` for a whole release: N(0, ``stds[j]``²) on tensor j, from stream j; then / ``divisor``.

        Small ones whose noise is counted are drawn together, which takes few kernels and gives each the same. On a CPU
        as many tensors, or segments of them, are noised at once as torch has threads, the largest first: each has a
        stream of its own, so their noise does not depend on how many there are.
        """
        alone: list[int] = []
        counted = CountedNoise(self._counted_digest(step))
        few = few_on(tensors[0].device) if tensors else 0
        for places in batches([tensor.numel() for tensor in tensors], few):
            some = [tensors[place] for place in places]
            kinds = {(tensor.device, tensor.dtype) for tensor in some}
            if len(some) == 1 or len(kinds) > 1 or not self._counts(some[0]):
                alone += places
                continue
            for place in places:
                self._check(tensors[place], stds[place])
            if any(stds[place] > 0.0 for place in places):
                counted.add_together_(some, [stds[place] for place in places], places, divisor)
            else:
                alone += places
        jobs = [
            job
            for place in sorted(alone, key=lambda place: -tensors[place].numel())
            for job in self._jobs(tensors[place], stds[place], step, place, divisor, counted)
        ]
        on_cpu = all(tensors[place].device.type == "cpu" for place in alone)
        threads = min(torch.get_num_threads(), len(jobs))
        if threads > 1 and on_cpu and sum(tensors[place].numel() for place in alone) >= ALONE:
            with ThreadPoolExecutor(threads) as pool:
                list(pool.map(call, jobs))  # raises what a thread raised
        else:
            for job in jobs:
                job()

    def _jobs(
        self, tensor: torch.Tensor, std: float, step: int, stream: int, divisor: float, counted: CountedNoise | None
    ) -> list[Callable[[], object]]:
        """:meth:`add_gaussian_` in parts, one after the other or side by side; ``counted`` is the step's."""
        self._check(tensor, std)
        parts = [tensor.detach()] if tensor.numel() else []
        if std == 0.0:
            return [partial(part.div_, divisor) for part in parts if divisor != 1.0]
        if self._pairs(tensor) and tensor.is_contiguous():
            parts = list(tensor.detach().view(-1).split(cpu_noise.SEGMENT))

        def noise(part: torch.Tensor, segment: int) -> None:
            add, chunk = self._adder(tensor, std, step, stream, divisor, counted, segment)
            _in_chunks(part, add, chunk)

        return [partial(noise, part, segment) for segment, part in enumerate(parts)]

    @staticmethod
    def _check(tensor: torch.Tensor, std: float) -> None:
        """Refuse what cannot be noised, as `NoiseSource.add_gaussian_` says."""
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            raise UserError(f"noise was asked for on a {type(tensor).__name__}; give this rank's local torch.Tensor.")
        if tensor.dtype not in (torch.float32, torch.float64):
            raise UserError(f"noise was asked for on {tensor.dtype}; convert the summed gradient to float32 first.")
        if not 0.0 <= std < math.inf:
            raise UserError(f"the noise's std is {std}; give a finite number of at least 0.")

    def _counts(self, tensor: torch.Tensor) -> bool:
        return not self.secure and (tensor.device.type != "cpu" if self.drawn is None else self.drawn == "counted")

    def _pairs(self, tensor: torch.Tensor) -> bool:
        return not self.secure and self.drawn == "pairs" and tensor.dtype == torch.float32

    def _adder(
        self,
        tensor: torch.Tensor,
        std: float,
        step: int,
        stream: int,
        divisor: float,
        counted: CountedNoise | None,
        segment: int,
    ) -> tuple[_Add, int]:
        """What adds noise to the tensor from a segment on, and how many entries at once at most."""
        if self._counts(tensor):
            counted = counted or CountedNoise(self._counted_digest(step))
            return counted.adder(tensor, std, stream, divisor), chunk_on(tensor.device)
        digest = self._digest(step, stream)
        if self.secure:
            lattice = LatticeNoise(digest, std)
            return lambda part: lattice.add_(part).div_(divisor), cpu_noise.ZIGGURAT_CHUNK
        if self._pairs(tensor):
            draw = cpu_noise.pairs(digest, std, tensor.numel(), segment)
            return _adder_of_pairs(draw, divisor), cpu_noise.PAIRS_CHUNK
        chunk, device = min(cpu_noise.ZIGGURAT_CHUNK, tensor.numel()), tensor.device
        draw = cpu_noise.ziggurat(digest, np.float32 if tensor.dtype == torch.float32 else np.float64, chunk)

        def add(part: torch.Tensor) -> None:
            part.add_(torch.from_numpy(draw(part.numel())).to(device).view(part.shape), alpha=std)
            if divisor != 1.0:
                part.div_(divisor)

        return add, chunk

    def _digest(self, step: int, stream: int) -> bytes:
        place = int(step).to_bytes(8, "big", signed=True) + int(stream).to_bytes(8, "big", signed=True)
        return hashlib.sha256(b"groupwise noise\0" + place + self.key).digest()

    def _counted_digest(self, step: int) -> bytes:
        """Of the step alone: the stream is a word of the counter."""
        return hashlib.sha256(
            b"groupwise counted noise\0" + int(step).to_bytes(8, "big", signed=True) + self.key
        ).digest()


def _adder_of_pairs(draw: cpu_noise.Draw, divisor: float) -> _Add:
    """Adds by numpy, which takes one thread whatever the size."""

    def add(part: torch.Tensor) -> None:
        drawn = draw(part.numel()).reshape(part.shape)
        if part.device.type != "cpu":
            part.add_(torch.from_numpy(drawn).to(part.device)).div_(divisor)
            return
        sums = part.detach().numpy()
        np.add(sums, drawn, out=sums)
        if divisor != 1.0:
            np.divide(sums, np.float32(divisor), out=sums)

    return add


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
        from scipy.special import ndtri

        words = self.words(count)
        draws = ndtri(((words >> np.uint64(1)).astype(np.float64) + 0.5) * 2.0**-64)
        return np.negative(draws, out=draws, where=(words & np.uint64(1)).astype(bool))


class LatticeNoise:
    """Adds N(0, ``std``²) to one tensor, part by part, on the lattice of its std.

    The sum is rounded to a multiple of the spacing g, and so is the noise. What is released is a function of their
    exact sum (its rounding to the tensor's type comes last), and rounding a Gaussian to multiples of g after adding a
    multiple of g is the same as before it. So the release is a post-processing of the real mechanism on rounded sums:
    every multiple of g can come out, whatever the sum. Rounding may move two neighbouring sums apart by g in each of D
    coordinates, so the noise multiplier is smaller by a factor of at most 1 + σ√D·2⁻⁴⁰.

    Raises:
        UserError: ``std`` is below 1e-200, where the lattice would leave the float64 numbers.
    """

    def __init__(self, key: bytes, std: float) -> None:
        if std < _SMALLEST:
            raise UserError(f"noise.secure=true was asked for noise of std {std}; give at least {_SMALLEST:g}.")
        self._stream = Keystream(key)
        self._spacing = lattice_spacing(std)
        self._scale = std / math.sqrt(2.0) / self._spacing

    def add_(self, part: torch.Tensor) -> torch.Tensor:
        """Noise the next ``part``, in place, and return it; the one rounding to its dtype comes last."""
        draws = self._stream.normals(2 * part.numel())  # an entry's two lie side by side, so parts of any size agree
        steps = np.rint((draws[::2] + draws[1::2]) * self._scale)
        noise = torch.from_numpy(steps * self._spacing).view(part.shape).to(part.device)
        return part.copy_((part.double() / self._spacing).round_().mul_(self._spacing).add_(noise))


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
        if not bound:
            return np.zeros(0, dtype=np.int64)
        return np.flatnonzero(words <= np.uint64(bound - 1)).astype(np.int64, copy=False)
