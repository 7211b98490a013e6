"""Draws all randomness of a private step from the run's secret key: dropout, stochastic depth, augmentation.

Sensitivity compares two runs in which the examples that both have see the same masks. Masks from a public seed are
dealt in the order of the batch, so one more example moves everybody else's, and the sums differ by far more than one
clipped gradient. Masks that nobody can predict, each example's of one law whatever its place, can be paired one by one
between the two runs. What this asks of a model is in ``docs/privacy.md``; it suffices:

Fix a step and all that was released before it. Let S be the examples drawn besides x, m_i the mask of example i,
g̃_i(m_i) its clipped gradient. Without x the release is Σ_{i∈S} g̃_i(m_i) + noise, a mixture of Gaussians over the masks
(m_i)_{i∈S}; with x drawn it is Σ_{i∈S} g̃_i(m_i) + g̃_x(m_x) + noise, a mixture over (m_i)_{i∈S} and m_x.

1. The masks of S have the same joint law in both: take the same ones. Given these and m_x, the two are Gaussians whose
   means are apart by g̃_x(m_x), at most C_k in group k, whatever the masks. Counts go the same way, each by ½.
2. E_α(P‖Q) = sup_Y P(Y) - αQ(Y) is jointly convex, hence jointly quasi-convex: a pair of mixtures with the same weights
   is no easier to distinguish than the worst pair of components. So the pair of step 1 is dominated by one Gaussian
   release at σ, in both directions, as without masks.
3. Poisson sampling draws x independently of S and of all masks, so the mixture over "x is drawn" is the one that is
   accounted.
4. Masks of a step are independent of those of all others and of the noise, so the steps compose as they do without.

The generators are statistical, not cryptographic, also where ``NoiseSource.secure`` holds. Torch's CPU generator keeps
32 bits of a seed, few enough to try them all, so it gets a whole state (624 words of SHAKE-256 of the key). Python's
and numpy's take 256 bits, CUDA's 64.
"""

import hashlib
import random
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
"""Of 32 bits each, in the state of the Mersenne twister (MT19937), which torch has on a CPU."""
_TORCH_STATE_BYTES = 5056
_seeds: list[tuple[Callable[[], int], int]] = []
"""Of torch's default generators, inside: how to ask for the seed, and what is answered as long as nobody sets one."""
_twisters: list[np.random.MT19937] = []
"""For numpy inside, where no other thread or context uses them: to exchange one is cheaper than to copy its state."""


@contextmanager
def secret_randomness(
    noise: NoiseSource, step: int, start: int = 0, *, process: int = 0, device: torch.device | str = "cpu"
) -> Iterator[Callable[[], None]]:
    """Inside, the default generators of torch (CPU and ``device``), Python and numpy follow from the run's key.

    Yields what puts them back to where they began.

    They are a pure function of (key, step, process, start), independent between any two of these, and of the noise and
    the batches. So a step that is replayed repeats its masks, and so does a second pass over the same microbatch.
    Afterwards, and after an error, the generators are where they were: nothing that is drawn later, such as a text that
    is shown, tells where they stood inside.

    A backward pass that runs layers again (rematerialisation) belongs inside too: torch then restores the masks, and
    draws them the way that they were drawn here.

    Args:
        noise: of the run, the same in all its processes. Masks of a predictable source are predictable.
        step: of the run. start: of this microbatch, its first example's place in the process's share of the batch.
        process: of the run, by number. device: of the model.
    """
    place = b"".join(int(number).to_bytes(8, "big", signed=True) for number in (step, process, start))
    digest = hashlib.shake_256(b"groupwise randomness\0" + place + noise.derive("randomness")).digest(4 * WORDS + 80)
    words = np.frombuffer(digest, ">u4", WORDS + 8).astype(np.uint32)
    device = torch.device(device)
    cuda = device.type == "cuda"
    of_python, of_numpy, outside = random.getstate(), np.random.get_state(legacy=False), _seeds[:]
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

    with torch.random.fork_rng(devices=[device] if cuda else []), _whole_masks():
        try:
            begin()
            yield begin
        finally:
            _seeds[:] = outside
            random.setstate(of_python)
            exchange.set_bit_generator(numpys)
            if of_numpy["has_gauss"]:  # the second of a pair of normals, which the exchange has lost
                np.random.set_state(of_numpy)
            _twisters.append(twister)


def refuse_another_seed() -> None:
    """Refuse losses whose masks are not the key's, as torch's default generators were seeded since it set them.

    Raises:
        UserError: they were, inside of `secret_randomness`; elsewhere never.
    """
    if any(ask() != seed for ask, seed in _seeds):
        raise UserError(
            "torch was seeded (torch.manual_seed, set_seed) while the losses of a microbatch were made, so their "
            "dropout follows from that seed and not from the secret key: seed before the training or after it, or give "
            "what needs a seed a torch.Generator of its own."
        )


def _torch_state(words: NDArray[np.uint32], seed: int) -> torch.Tensor:
    """A state for ``torch.set_rng_state`` from a twister's words (624,), none of them used yet.

    `seed` is what the generator answers when it is asked for its own, and decides on nothing.
    Layout, in machine order: seed u64, words left i32, seeded i32, next u64, 624 words as u64, caches of normals.
    """
    state = np.zeros(_TORCH_STATE_BYTES, np.uint8)
    state[:8].view(np.uint64)[:] = seed
    state[8:16].view(np.int32)[:] = 1  # one word "left" has torch make 624 new ones first, as any twister does
    state[24 : 24 + 8 * WORDS].view(np.uint64)[:] = words
    return torch.from_numpy(state)


@contextmanager
def _whole_masks() -> Iterator[None]:
    """Inside, dropout on the CPU takes a word of the generator for every entry, on every make of CPU.

    On Intel's, torch hands a whole mask to MKL's MCG31 with a seed of 31 bits, which are again few enough to try.
    """
    if _in_force:  # torch before 2.13 refuses a second replacement
        yield
        return
    _hush()
    _in_force.append(_library())
    try:
        yield
    finally:
        _in_force.pop()._destroy()


_in_force: list[torch.library.Library] = []
"""The replacement that is made now, at most one in a process."""


def _library() -> torch.library.Library:
    library = torch.library.Library("aten", "IMPL")
    library.impl("bernoulli_.float", torch.compiler.disable(_bernoulli), "CPU")  # else dynamo compiles it as a frame
    return library


@cache
def _hush() -> None:
    """Torch says once in a process that a kernel is replaced: hear it here, where that is what is wanted."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _library()._destroy()


def _bernoulli(self: torch.Tensor, p: float = 0.5, *, generator: torch.Generator | None = None) -> torch.Tensor:
    return self.copy_(torch.rand(self.shape, generator=generator) < p)
