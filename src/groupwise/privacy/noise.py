"""Draws Gaussian noise once, so that it can be replayed: a pure function of (key, step, stream); securely if asked."""

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
"""Stream of the noise on the clip counts; gradients use stream 0."""
GENERATORS = ("SFC64", "Philox")
"""Where noise that is not secure comes from; see `NoiseSource`."""
ALONE = 1 << 18
"""Entries of a release that are not worth a second thread."""


class NoiseSource:
    """A secret key, and the noise that it stands for.

    Make one with :meth:`fresh` (OS entropy), :meth:`from_key` (resume) or :meth:`from_seed` (debugging: the noise can
    be predicted, ``is_secret`` is False and the run is not private). Processes that hold the same key draw the same
    noise: replicas (DDP) stay equal and noise is added once; owners of different shards take a :meth:`child` each.

    ``secure`` draws from a cipher and adds on a lattice (`groupwise.privacy.secure_noise`), on the CPU. Else
    ``generator`` is one of `GENERATORS`: "SFC64" draws on the CPU (`groupwise.privacy.cpu_noise`), "Philox" where the
    tensor is, the same on every device (`groupwise.privacy.philox_noise`). None is "SFC64" for tensors on a CPU and
    "Philox" for others. A run settles it as it begins (:meth:`settled`), and its checkpoint keeps it, so that replayed
    steps repeat their noise on another device too.
    """

    def __init__(self, key: bytes, is_secret: bool, secure: bool = False, generator: str | None = None) -> None:
        if not isinstance(key, bytes) or len(key) < 16:
            raise UserError("the noise key is shorter than 16 bytes; make one with NoiseSource.fresh().")
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
    def from_key(cls, key: bytes, is_secret: bool = True, secure: bool = False, generator: str | None = None) -> Self:
        """Return the source of a key kept from before (at least 16 bytes); pass on what else it had."""
        return cls(key, is_secret, secure, generator)

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Self:
        """Return the source of :meth:`state_dict`.

        Raises:
            UserError: the state is none, or one of an earlier version, whose noise this version does not repeat.
        """
        names = ("key", "is_secret", "secure", "generator")
        if not all(f"noise_{name}" in state for name in names):
            raise UserError("The state holds no noise key that this version can go on with: start a new training.")
        return cls(*(state[f"noise_{name}"] for name in names))

    @classmethod
    def from_seed(cls, seed: int, secure: bool = False) -> Self:
        """Return a predictable source for debugging and tests: no privacy guarantee holds for what it noises."""
        return cls(hashlib.sha256(b"groupwise debug seed %d" % seed).digest(), False, secure)

    def __repr__(self) -> str:
        """Never the key: a log or a traceback may show this."""
        return f"NoiseSource(is_secret={self.is_secret}, secure={self.secure})"

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps of it."""
        return {f"noise_{name}": value for name, value in vars(self).items()}

    def child(self, purpose: str) -> Self:
        """Return a source of the same kind whose noise is independent of this one's: a stage's, or a shard's."""
        return type(self)(self.derive(purpose), self.is_secret, self.secure, self.generator)

    def settled(self, device: torch.device) -> Self:
        """Return this source with ``generator`` decided: as it is, or else by the device that a run begins on."""
        return type(self)(self.key, self.is_secret, self.secure, self.generator or _generator_for(device))

    def derive(self, purpose: str) -> bytes:
        """Return a 32-byte key for another secret draw, such as the Poisson sampler's; it tells nothing of this key."""
        return hashlib.sha256(b"groupwise derived\0" + purpose.encode() + b"\0" + self.key).digest()

    def add_gaussian_(self, tensor: Tensor, std: float, step: int, stream: int) -> Tensor:
        """:meth:`add_gaussians_` for one tensor, which is returned."""
        self.add_gaussians_([tensor], [std], step, stream=stream)
        return tensor

    @torch.no_grad()
    def add_gaussians_(
        self, tensors: Sequence[Tensor], stds: Sequence[float], step: int, divisor: float = 1.0, *, stream: int = 0
    ) -> None:
        """Add N(0, ``stds[j]``²) to every entry of tensor j in place, and divide by ``divisor``: one release.

        Noise is float64 for float64 tensors, float32 for float32 ones, and independent between entries, steps and
        streams. Entries are numbered through the tensors of a dtype in row-major order, so neither memory layout nor
        threads change the noise. One (step, stream) serves one release only: used twice, the noises are equal and the
        guarantee is lost.

        Raises:
            UserError: a narrower dtype (its rounding is wider than the noise's law allows for), a distributed tensor,
                or a std that is negative or not finite.
        """
        for tensor, std in zip(tensors, stds, strict=True):
            self._check(tensor, std)
        flat = [tensor.view(-1) if tensor.is_contiguous() else tensor.reshape(-1) for tensor in tensors]
        jobs = list(self._jobs(flat, stds, step, stream, divisor))
        threads = min(torch.get_num_threads(), len(jobs))
        on_cpu = all(tensor.device.type == "cpu" for tensor in tensors)
        if threads > 1 and on_cpu and sum(map(len, flat)) >= ALONE:
            with ThreadPoolExecutor(threads) as pool:
                list(pool.map(call, jobs))  # raises what a thread raised
        else:
            for job in jobs:
                job()
        for tensor, noised in zip(tensors, flat, strict=True):
            if not tensor.is_contiguous():
                tensor.copy_(noised.view(tensor.shape))

    def _jobs(
        self, flat: Sequence[Tensor], stds: Sequence[float], step: int, stream: int, divisor: float
    ) -> Iterator[Callable[[], object]]:
        """The release in chunks, which are numbered and may be noised in any order."""
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
        """Noise the parts of one chunk with numbers that are drawn on the CPU."""
        if self.secure:
            secure_noise.add_on_lattice(digest, chunk, parts, stds)
            for part in parts:
                part.div_(divisor)
            return
        sizes = [len(part) for part in parts]
        noises = cpu_noise.normals(digest, chunk, sum(sizes), parts[0].dtype, compiled=self.is_secret).split(sizes)
        for part, noise, std in zip(parts, noises, stds, strict=True):
            if part.device.type == "cpu":  # torch would take several threads for it
                cpu_noise.add_scaled(part.numpy(), noise.numpy(), std, divisor, compiled=self.is_secret)
            else:
                part.add_(noise.mul_(std).to(part.device)).div_(divisor)

    @staticmethod
    def _check(tensor: Tensor, std: float) -> None:
        """Refuse what cannot be noised."""
        if type(tensor) not in (Tensor, torch.nn.Parameter):
            raise UserError(f"noise was asked for on a {type(tensor).__name__}; give this rank's local torch.Tensor.")
        if tensor.dtype not in (torch.float32, torch.float64):
            raise UserError(f"noise was asked for on {tensor.dtype}; convert the summed gradient to float32 first.")
        if not 0.0 <= std < math.inf:
            raise UserError(f"the noise's std is {std}; give a finite number of at least 0.")

    def _digest(self, step: int, stream: int) -> bytes:
        place = int(step).to_bytes(8, "big", signed=True) + int(stream).to_bytes(8, "big", signed=True)
        return hashlib.sha256(b"groupwise noise\0" + place + self.key).digest()


def _generator_for(device: torch.device) -> str:
    return "SFC64" if device.type == "cpu" else "Philox"


def _chunks(tensors: Sequence[tuple[Tensor, float]], size: int) -> Iterator[tuple[list[Tensor], list[float]]]:
    """Cut the entries of flat tensors, in their order, into chunks of ``size``: parts, and the std of each."""
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
