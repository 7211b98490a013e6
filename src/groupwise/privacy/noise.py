"""Draws Gaussian noise as a pure function of (key, step, stream), so that a resumed run repeats it."""

import hashlib
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import accumulate
from operator import call
from typing import Any, Self

import torch
from torch import Tensor

from groupwise.errors import UserError
from groupwise.privacy import cpu_noise, philox_noise, secure_noise

COUNT_STREAM = -1
"""The stream of the noise on the clip counts; gradients use stream 0."""
GENERATORS = ("SFC64", "Philox")
"""The generators of noise without ``secure``; see `NoiseSource`."""
ALONE = 1 << 18
"""Up to this many entries in a release, one thread is faster than several."""


class NoiseSource:
    """A secret key, and the noise that is derived from it.

    Create one with :meth:`fresh` (OS entropy), with :meth:`from_state` (a checkpoint), or with :meth:`from_seed` for
    debugging: that noise is predictable, so ``is_secret`` is False and the run is not private. Processes with the same
    key draw the same noise, so replicas stay equal and the noise counts once. Processes with different shards need one
    :meth:`child` each.

    ``secure`` draws from a cipher and adds on a lattice (`groupwise.privacy.secure_noise`), on the CPU. Otherwise
    ``generator`` is one of `GENERATORS`. "SFC64" draws on the CPU (`groupwise.privacy.cpu_noise`). "Philox" draws on
    the tensor's device, with the same result on every device (`groupwise.privacy.philox_noise`). None means "SFC64" for
    CPU tensors and "Philox" for others. A run fixes the generator when it starts (:meth:`settled`) and saves it in its
    checkpoints, so that it repeats the same noise when it resumes on another device.

    Raises :class:`UserError` for a key of fewer than 16 bytes, or an unknown generator.
    """

    def __init__(self, key: bytes, is_secret: bool = True, secure: bool = False, generator: str | None = None) -> None:
        if not isinstance(key, bytes) or len(key) < 16:
            raise UserError("the noise key must be at least 16 bytes; make one with NoiseSource.fresh().")
        if generator not in (None, *GENERATORS):
            raise UserError(f"generator is {generator!r}; give one of {', '.join(GENERATORS)}, or None.")
        self.key = key
        self.is_secret = is_secret
        self.secure = secure
        self.generator = generator

    @classmethod
    def fresh(cls, secure: bool = False) -> Self:
        """Return a source with 256 bits of the operating system's entropy."""
        return cls(os.urandom(32), True, secure)

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Self:
        """Return the source that :meth:`state_dict` describes.

        Raises :class:`UserError` for another state, or one of an earlier version, whose noise cannot be repeated.
        """
        names = ("key", "is_secret", "secure", "generator")
        if not all(f"noise_{name}" in state for name in names):
            raise UserError(
                "The state has no noise key that this version can use: give the dict that private.state_dict() "
                "returned. One of an earlier version cannot be resumed: start a new training."
            )
        return cls(*(state[f"noise_{name}"] for name in names))

    @classmethod
    def from_seed(cls, seed: int, secure: bool = False) -> Self:
        """Return a predictable source for debugging and tests: its noise gives no privacy guarantee."""
        return cls(hashlib.sha256(b"groupwise debug seed %d" % seed).digest(), False, secure)

    def __repr__(self) -> str:
        """Return a text without the key, since it may end up in a log or a traceback."""
        return f"NoiseSource(is_secret={self.is_secret}, secure={self.secure})"

    def state_dict(self) -> dict[str, Any]:
        """Return the attributes to save in a checkpoint, the key included."""
        return {f"noise_{name}": value for name, value in vars(self).items()}

    def child(self, purpose: str) -> Self:
        """Return a source with the same settings and independent noise, for a pipeline stage or a shard."""
        return type(self)(self.derive(purpose), self.is_secret, self.secure, self.generator)

    def settled(self, device: torch.device) -> Self:
        """Return this source with ``generator`` fixed. If it is None, it becomes the one for ``device``."""
        return type(self)(self.key, self.is_secret, self.secure, self.generator or _generator_for(device))

    def derive(self, purpose: str) -> bytes:
        """Return a 32-byte key for other secret draws, such as the Poisson sampler's. It does not reveal this key."""
        return hashlib.sha256(b"groupwise derived\0" + purpose.encode() + b"\0" + self.key).digest()

    def add_gaussian_(self, tensor: Tensor, std: float, step: int, stream: int) -> Tensor:
        """Call :meth:`add_gaussians_` for one tensor, and return it."""
        self.add_gaussians_([tensor], [std], step, stream=stream)
        return tensor

    @torch.no_grad()
    def add_gaussians_(
        self, tensors: Sequence[Tensor], stds: Sequence[float], step: int, divisor: float = 1.0, *, stream: int = 0
    ) -> None:
        """Add N(0, ``stds[j]``²) to every entry of tensor j in place, and divide by ``divisor``: one release.

        The noise has the tensor's dtype (float64 or float32), and is independent between entries, steps and streams.
        Entries are numbered through all tensors of a dtype in row-major order, so the noise does not depend on memory
        layout or the number of threads. Use each (step, stream) for one release only: a second release would get the
        same noise, and the guarantee would be lost.

        Raises :class:`UserError` for a narrower dtype (its rounding would distort the noise), a distributed tensor, or
        a std that is negative or not finite.
        """
        for tensor, std in zip(tensors, stds, strict=True):
            self._check(tensor, std)
        flat = [tensor.view(-1) if tensor.is_contiguous() else tensor.reshape(-1) for tensor in tensors]
        jobs = list(self._jobs(flat, stds, step, stream, divisor))
        threads = min(torch.get_num_threads(), len(jobs))
        on_cpu = all(tensor.device.type == "cpu" for tensor in tensors)
        if threads > 1 and on_cpu and sum(map(len, flat)) >= ALONE:
            with ThreadPoolExecutor(threads) as pool:
                list(pool.map(call, jobs))  # list() raises the exceptions of the threads
        else:
            for job in jobs:
                job()
        for tensor, noised in zip(tensors, flat, strict=True):
            if not tensor.is_contiguous():
                tensor.copy_(noised.view(tensor.shape))

    def _jobs(
        self, flat: Sequence[Tensor], stds: Sequence[float], step: int, stream: int, divisor: float
    ) -> Iterator[Callable[[], object]]:
        """Yield the work of a release in numbered chunks, which may run in any order."""
        digest, chunk, first = self._digest(step, stream), 0, 0
        for dtype in (torch.float32, torch.float64):
            of_dtype = [(tensor, std) for tensor, std in zip(flat, stds, strict=True) if tensor.dtype == dtype]
            yield from (partial(tensor.div_, divisor) for tensor, std in of_dtype if std == 0.0 and divisor != 1.0)
            noised = [(tensor, std) for tensor, std in of_dtype if std > 0.0 and len(tensor)]
            if not noised:
                continue
            if not self.secure and (self.generator or _generator_for(noised[0][0].device)) == "Philox":
                *firsts, first = accumulate((len(tensor) for tensor, _ in noised), initial=first)
                numbered = [(*each, number) for each, number in zip(noised, firsts, strict=True)]
                yield partial(philox_noise.add_, digest, numbered, divisor)
                continue
            for parts, of_parts in _chunks(noised, secure_noise.CHUNK if self.secure else cpu_noise.CHUNK):
                yield partial(self._add, digest, chunk, parts, of_parts, divisor)
                chunk += 1

    def _add(self, digest: bytes, chunk: int, parts: list[Tensor], stds: list[float], divisor: float) -> None:
        """Draw noise on the CPU and add it to the parts of one chunk."""
        if self.secure:
            secure_noise.add_on_lattice(digest, chunk, parts, stds)
            for part in parts:
                part.div_(divisor)
            return
        sizes = [len(part) for part in parts]
        noises = cpu_noise.normals(digest, chunk, sum(sizes), parts[0].dtype, compiled=self.is_secret).split(sizes)
        for part, noise, std in zip(parts, noises, stds, strict=True):
            if part.device.type == "cpu":  # torch would use several threads
                cpu_noise.add_scaled(part.numpy(), noise.numpy(), std, divisor, compiled=self.is_secret)
            else:
                part.add_(noise.mul_(std).to(part.device)).div_(divisor)

    @staticmethod
    def _check(tensor: Tensor, std: float) -> None:
        """Raise a `UserError` for a tensor or std that is not supported."""
        if type(tensor) not in (Tensor, torch.nn.Parameter):
            raise UserError(f"noise cannot be added to a {type(tensor).__name__}; give this rank's local torch.Tensor.")
        if tensor.dtype not in (torch.float32, torch.float64):
            raise UserError(f"noise cannot be added to {tensor.dtype}; convert the summed gradient to float32 first.")
        if not 0.0 <= std < math.inf:
            raise UserError(f"the noise's std is {std}; give a finite number of at least 0.")

    def _digest(self, step: int, stream: int) -> bytes:
        place = int(step).to_bytes(8, "big", signed=True) + int(stream).to_bytes(8, "big", signed=True)
        return hashlib.sha256(b"groupwise noise\0" + place + self.key).digest()


def _generator_for(device: torch.device) -> str:
    return "SFC64" if device.type == "cpu" else "Philox"


def _chunks(tensors: Sequence[tuple[Tensor, float]], size: int) -> Iterator[tuple[list[Tensor], list[float]]]:
    """Split flat tensors, in order, into chunks of ``size`` entries. Yields a chunk's parts and the std of each."""
    parts, stds, room = list[Tensor](), list[float](), size
    for tensor, std in tensors:
        rest = tensor
        while len(rest):
            parts.append(rest[:room])
            stds.append(std)
            room, rest = room - len(parts[-1]), rest[room:]
            if not room:
                yield parts, stds
                parts, stds, room = [], [], size
    if parts:
        yield parts, stds
