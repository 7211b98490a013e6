"""Draws all randomness of a private step from the run's secret key: dropout, stochastic depth, augmentation.

Sensitivity compares two runs in which the common examples have the same masks. Masks from a public seed are assigned in
the order of the batch, so one more example changes the masks of the others, and the sums differ by far more than one
clipped gradient. Secret masks, whose distribution does not depend on an example's position, can be paired one by one
between the two runs. ``docs/privacy.md`` says what this requires of a model. Here is the proof that it suffices.

Fix a step and all earlier releases. Let S be the drawn examples except x, m_i the mask of example i, and g̃_i(m_i) its
clipped gradient. Without x the release is Σ_{i∈S} g̃_i(m_i) + noise, a mixture of Gaussians over the masks (m_i)_{i∈S}.
With x it is Σ_{i∈S} g̃_i(m_i) + g̃_x(m_x) + noise, a mixture over (m_i)_{i∈S} and m_x.

1. The masks of S have the same joint distribution in both runs, so pair equal ones. Given these and m_x, the releases
   are two Gaussians whose means differ by g̃_x(m_x), at most C_k in group k for any masks. Each centred count differs by
   ½ in the same way.
2. E_α(P‖Q) = sup_Y P(Y) - αQ(Y) is jointly convex, hence jointly quasi-convex: a pair of mixtures with the same weights
   is no easier to distinguish than the worst pair of components. So one Gaussian release at σ dominates the pair of
   step 1 in both directions, as without masks.
3. Poisson sampling draws x independently of S and of all masks, so the mixture over "x is drawn" is the one that the
   accountant assumes.
4. The masks of a step are independent of all other steps' masks and of the noise, so steps compose as without masks.

The generators are statistical, not cryptographic, even with ``NoiseSource.secure``. Torch's CPU generator keeps only 32
bits of a seed, few enough to try all of them. So its whole state is set (624 words of SHAKE-256 of the key). Python's
and numpy's generators take 256 bits, and CUDA's 64.
"""

import hashlib
import random
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from groupwise.errors import UserError
from groupwise.privacy.noise import NoiseSource

WORDS = 624
"""The state of torch's CPU generator, the Mersenne twister MT19937, in words of 32 bits."""
_TORCH_STATE_BYTES = 5056
_seeds: list[tuple[Callable[[], int], int]] = []
"""Inside `secret_randomness`: for each default generator of torch, a function that returns its seed, and the seed."""
_twisters: list[np.random.MT19937] = []
"""numpy's generators for use inside `secret_randomness`; to replace the generator is faster than to copy its state."""
_one_thread = threading.RLock()
"""Held inside `secret_randomness`, as threads share the default generators."""


@contextmanager
def secret_randomness(
    noise: NoiseSource, step: int, start: int = 0, *, process: int = 0, device: torch.device | str = "cpu"
) -> Iterator[Callable[[], None]]:
    """Inside, seed the default generators of torch (CPU and ``device``), Python and numpy from the run's key.

    Yields a function that sets them back to their state at the beginning.

    Their states are a pure function of (key, step, process, start). They are independent between any two of these, and
    of the noise and the batches. So a repeated step repeats its masks, as does a second pass over the same microbatch.
    On exit, also after an error, the generators have the same states as before. So nothing that is drawn later, such as
    a generated text, depends on their states inside. (``numpy.random`` forgets the second of a pair of normals.)

    A backward pass that runs layers again (rematerialisation) belongs inside as well, so that it draws the same masks.

    Args:
        noise: the run's source, the same in all its processes. If it is predictable, so are the masks.
        start: the position of the microbatch's first example in the process's share of the batch.
    """
    place = b"".join(int(number).to_bytes(8, "big", signed=True) for number in (step, process, start))
    digest = hashlib.shake_256(b"groupwise randomness\0" + place + noise.derive("randomness")).digest(4 * WORDS + 80)
    words = np.frombuffer(digest, ">u4", WORDS + 8).astype(np.uint32)
    device = torch.device(device)
    cuda = device.type == "cuda"
    with _one_thread, torch.random.fork_rng(devices=[device] if cuda else []), _whole_masks():
        of_python, outside = random.getstate(), _seeds[:]
        exchange: Any = np.random  # whose stubs lack the two functions
        numpys, twister = exchange.get_bit_generator(), _twisters.pop() if _twisters else np.random.MT19937()
        exchange.set_bit_generator(twister)

        def begin() -> None:
            torch.set_rng_state(_torch_state(words[:WORDS], seed=int.from_bytes(digest[-8:], "big")))
            _seeds[:] = [(torch.initial_seed, torch.initial_seed())]
            random.seed(digest[-48:-16], version=2)
            np.random.seed(words[WORDS:])
            if cuda:
                with torch.cuda.device(device):
                    torch.cuda.manual_seed(int.from_bytes(digest[-16:-8], "big", signed=True))
                    generator = torch.cuda.default_generators[torch.cuda.current_device()]
                    _seeds.append((generator.initial_seed, generator.initial_seed()))

        try:
            begin()
            yield begin
        finally:
            _seeds[:] = outside
            random.setstate(of_python)
            exchange.set_bit_generator(numpys)
            _twisters.append(twister)


def refuse_another_seed() -> None:
    """Raise a `UserError` if torch was seeded inside `secret_randomness`: masks would not follow from the key."""
    if any(ask() != seed for ask, seed in _seeds):
        raise UserError(
            "torch was seeded (torch.manual_seed, set_seed) while the losses of a microbatch were computed, so their "
            "dropout follows from that seed and not from the secret key: seed before or after the training, or use a "
            "separate torch.Generator."
        )


def _torch_state(words: NDArray[np.uint32], seed: int) -> torch.Tensor:
    """Return a state for ``torch.set_rng_state`` from the words (624,) of a twister, none of them used yet.

    `seed` is what ``torch.initial_seed`` then returns; it does not affect any draw.
    Layout, in native byte order: seed u64, words left i32, seeded i32, next u64, 624 words as u64, cached normals.
    """
    state = np.zeros(_TORCH_STATE_BYTES, np.uint8)
    state[:8].view(np.uint64)[:] = seed
    state[8:16].view(np.int32)[:] = 1  # with one word left, torch first generates 624 new ones, as any twister does
    state[24 : 24 + 8 * WORDS].view(np.uint64)[:] = words
    return torch.from_numpy(state)


@contextmanager
def _whole_masks() -> Iterator[None]:
    """Inside, dropout on the CPU uses one word of the generator for each entry, on every CPU.

    On Intel CPUs torch would draw a whole mask by MKL's MCG31 from a seed of 31 bits, again few enough to try all.
    """
    if _in_force:  # torch before 2.13 raises an error for a second replacement
        yield
        return
    _hush()
    _in_force.append(_library())
    try:
        yield
    finally:
        _in_force.pop()._destroy()


_in_force: list[torch.library.Library] = []
"""The active replacement, at most one in a process."""


def _library() -> torch.library.Library:
    library = torch.library.Library("aten", "IMPL")
    library.impl("bernoulli_.float", torch.compiler.disable(_bernoulli), "CPU")  # keeps dynamo from compiling it
    return library


@cache
def _hush() -> None:
    """Trigger and suppress torch's warning, once in a process, that a kernel is replaced."""
    with warnings.catch_warnings(action="ignore"):
        _library()._destroy()


def _bernoulli(self: torch.Tensor, p: float = 0.5, *, generator: torch.Generator | None = None) -> torch.Tensor:
    return self.copy_(torch.rand(self.shape, generator=generator) < p)
