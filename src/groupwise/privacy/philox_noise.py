"""Draws standard normals on a GPU by counting: a draw is a function of (key, its place), the same on every device.

A generator of a GPU hands its numbers out to as many threads as that model has, so another model draws other noise from
the same seed. Here the numbers come from Philox4x32-10 (Salmon et al., 2011), a keyed permutation of a counter of 128
bits, in whole numbers of torch: equal bits everywhere. Draws 2j and 2j + 1 of a release are the Box-Muller pair of the
counter (j, c2, c3) of 64, 32 and 32 bits, where c2, c3 and Philox's key of 64 bits are 128 secret bits of the release.
Radius and angle take 64 bits each and are computed in float64, whose last bits may differ between devices: so a draw is
the same up to about 1e-15, and rounded to float32 it is the same number but once in some ten million times. The radius
ends at 9.5 standard deviations, which a Gaussian passes with a chance of 2e-21, and is never 0.

Plain operations pass over memory a hundred times. Triton makes them one kernel on a GPU that it knows; `COMPILED`
switches that off.
"""

import math
import warnings
from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

CHUNK = 1 << 21
"""Draws at a time, about 100 bytes each while it lasts."""
COMPILED = True
"""Whether the operations are compiled for a GPU."""
COUNTING = ("cpu", "cuda")
"""Devices that compute with int64 and float64; for others the noise is drawn on the CPU."""
ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
INCREMENTS = (0x9E3779B9, 0xBB67AE85)
WORD = 0xFFFFFFFF


def normals(digest: bytes, chunk: int, count: int, device: torch.device) -> Tensor:
    """The first `count` draws of N(0, 1), float64, of chunk number `chunk` of a release; ``digest`` is its secret."""
    where = device if device.type in COUNTING else torch.device("cpu")
    words = [int.from_bytes(digest[at : at + 4], "little") for at in range(0, 16, 4)]
    secret = torch.tensor(words, dtype=torch.int64).to(where, non_blocking=True)
    first = chunk * (CHUNK // 2)
    blocks = torch.arange(first, first + (count + 1) // 2, device=where)
    return draw_on(where)(blocks, secret)[:count]


def pairs(blocks: Tensor, secret: Tensor) -> Tensor:
    """The Box-Muller pairs of counters: int64 (n,) and four secret words, int64 (4,): float64 (2n,)."""
    counter = (blocks & WORD, blocks >> 32, secret[2], secret[3])
    first, second, third, fourth = philox(counter, (secret[0], secret[1]))
    uniform = (first.double() * 2.0**-32).add(second.double().add(0.5), alpha=2.0**-64).clamp(max=1.0 - 2.0**-53)
    radius = uniform.log().mul(-2.0).sqrt()
    angle = (third.double() * 2.0**-32).add(fourth.double(), alpha=2.0**-64).mul(2.0 * math.pi)
    return torch.stack((radius * angle.cos(), radius * angle.sin()), dim=1).flatten()


def philox(counter: tuple[Tensor, ...], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Philox4x32-10 of counters of four words, int64 in [0, 2³²) that broadcast: four words.

    A product of two words wraps around in int64: its 64 bits are right, and ``>>`` only repeats the highest. Its lower
    word is cut to 32 bits when it is used.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        even, odd = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0, c1, c2, c3 = ((odd >> 32) ^ c1 ^ k0) & WORD, odd, ((even >> 32) ^ c3 ^ k1) & WORD, even
        k0, k1 = (k0 + INCREMENTS[0]) & WORD, (k1 + INCREMENTS[1]) & WORD
    return c0, c1 & WORD, c2, c3 & WORD


@lru_cache
def draw_on(device: torch.device) -> Callable[[Tensor, Tensor], Tensor]:
    """:func:`pairs` for a device, compiled where that works and gives the same numbers."""
    if not (COMPILED and device.type == "cuda" and torch.cuda.is_available()):
        return pairs
    compiled = torch.compile(pairs, dynamic=True)
    blocks, secret = torch.arange(2**33 - 50, 2**33 + 50, device=device), torch.arange(1, 5, device=device)
    try:
        if torch.allclose(compiled(blocks, secret), pairs(blocks, secret), rtol=0.0, atol=1e-12):
            return compiled
        reason = "its draws differ from those of plain operations"
    except Exception as error:  # whatever a compiler raises
        reason = str(error).splitlines()[0]
    warnings.warn(f"The noise is not compiled, so it takes longer to draw: {reason}.", stacklevel=2)
    return pairs
