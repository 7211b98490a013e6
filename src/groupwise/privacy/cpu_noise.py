"""Draws standard normals on a CPU: Box-Muller pairs in float32, numpy's normals in float64.

Both take their bits from SFC64, which numpy seeds with 128 bits of a hash. A pair is ±r·sin a and ±r·cos a for an angle
a in (0, π/2) of 30 bits, with r² = -2 ln u. u has 63 bits and is taken in float64, so r ends at 9.4 standard
deviations, which a Gaussian passes once in 10²⁰ draws, and is never 0. Both sin a and cos a are sines of an angle that
is made from a whole number, so they keep their digits where they are small: no draw is 0, nor any other number more
often than the spacing of float32 asks for.

numpy's vectorised functions may differ in their last bit from processor to processor, and so may the draws. Where the
package was installed with a C compiler, `normals.c` draws pairs four times as fast: the same bits on every processor,
and numpy's but for the last two. Noise from a published key stays numpy's, so that a training is repeated to the bit
without a compiler too.
"""

import ctypes
import math
from hashlib import sha256
from importlib.util import find_spec

import numpy as np
import torch
from torch import Tensor

CHUNK = 1 << 17
"""Draws of one seed, each with 14 bytes of memory. Of fewer, threads would wait for each other's Python."""
MAGNITUDE, SIGN = np.int32(2**30 - 1), np.int32(-(2**31))
"""The lower bits of a word are an angle, its two highest are signs."""


def bits_of(digest: bytes) -> np.random.SFC64:
    """The stream of random bits that a hash stands for."""
    return np.random.SFC64(int.from_bytes(digest, "big"))


def normals(digest: bytes, chunk: int, count: int, dtype: torch.dtype, compiled: bool = False) -> Tensor:
    """The first `count` draws of N(0, 1), float32 or float64, of chunk number `chunk` of a release.

    `compiled` takes `COMPILED` where it is there.
    """
    bits = bits_of(sha256(digest + chunk.to_bytes(8, "big")).digest())
    if dtype == torch.float64:
        return torch.from_numpy(np.random.Generator(bits).standard_normal(count))
    pairs = -(-count // 4) * 2  # two angles fit into a word
    if compiled and COMPILED is not None:
        words, state = np.empty(pairs + pairs // 2, np.uint64), bits.state["state"]["state"]
        COMPILED.random_words(state.ctypes.data, words.ctypes.data, len(words))
        make_pairs = box_muller_compiled
    else:
        words, make_pairs = bits.random_raw(pairs + pairs // 2), box_muller
    return torch.from_numpy(make_pairs(words[:pairs].view(np.int64), words[pairs:].view(np.int32))[:count])


def add_scaled(sums: np.ndarray, drawn: np.ndarray, std: float, divisor: float, compiled: bool = False) -> None:
    """``(sums + std · drawn) / divisor`` in place, of 1-dimensional float32 or float64; `drawn` is used up."""
    if compiled and COMPILED is not None and sums.dtype == np.float32 and sums.flags.c_contiguous:
        COMPILED.add_scaled(sums.ctypes.data, drawn.ctypes.data, std, divisor, len(sums))
        return
    drawn *= drawn.dtype.type(std)
    sums += drawn
    if divisor != 1.0:
        sums /= sums.dtype.type(divisor)


def _library() -> ctypes.CDLL | None:
    """`normals.c`, compiled; None where there was no compiler."""
    found = find_spec("groupwise.privacy._normals")
    if found is None or found.origin is None:
        return None
    library, address, size = ctypes.CDLL(found.origin), ctypes.c_void_p, ctypes.c_size_t
    library.random_words.argtypes = [address, address, size]
    library.box_muller.argtypes = [address, address, address, size]
    library.add_scaled.argtypes = [address, address, ctypes.c_float, ctypes.c_float, size]
    return library


COMPILED = _library()


def box_muller_compiled(radii: np.ndarray, angles: np.ndarray) -> np.ndarray:
    """As `box_muller`, by `COMPILED`."""
    assert COMPILED is not None
    drawn = np.empty(2 * len(radii), np.float32)
    COMPILED.box_muller(radii.ctypes.data, angles.ctypes.data, drawn.ctypes.data, len(radii))
    return drawn


def box_muller(radii: np.ndarray, angles: np.ndarray) -> np.ndarray:
    """Return n pairs of normals for random words, int64 (n,) and int32 (n,): float32 (2n,)."""
    n = len(radii)
    uniform, drawn = np.empty(n), np.empty(2 * n, np.float32)
    np.multiply(radii, 2.0**-63 * (1.0 - 2.0**-53), out=uniform)
    np.abs(uniform, out=uniform)
    uniform += 2.0**-64
    np.log(uniform, out=uniform)
    radius = drawn[n:]
    np.copyto(radius, uniform, casting="same_kind")
    radius *= np.float32(-2.0)
    np.sqrt(radius, out=radius)
    whole, sine = uniform.view(np.int32)[:n], uniform.view(np.float32)[n:]  # the uniform numbers are done with
    for half, flipped, sign in ((drawn[:n], np.int32(0), 0), (radius, MAGNITUDE, 1)):
        np.bitwise_and(angles, MAGNITUDE, out=whole)
        whole ^= flipped
        np.add(whole, np.float32(0.5), out=sine, dtype=np.float32, casting="same_kind")
        sine *= np.float32(math.pi * 2.0**-31)  # an angle in (0, π/2), or what it lacks of π/2
        np.sin(sine, out=sine)
        np.multiply(sine, radius, out=half)
        np.left_shift(angles, sign, out=whole)
        whole &= SIGN
        half.view(np.int32)[:] ^= whole
    return drawn
