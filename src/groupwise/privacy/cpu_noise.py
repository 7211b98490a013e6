"""Draws standard normals on a CPU: Box-Muller pairs in float32, numpy's normals in float64.

Both take their bits from SFC64, which a SHA-256 hash seeds through numpy's SeedSequence (128 bits). A pair is ±r·sin a
and ±r·cos a, where r² = -2 ln u and the angle a in (0, π/2) has 30 bits. u has 63 bits and is computed in float64. So r
is never 0 and at most 9.4 standard deviations, which a Gaussian exceeds once in 10²⁰ draws. Both sin a and cos a are
computed as the sine of an angle from an integer, so that small values are accurate too: no draw is 0, and no number is
more frequent than the spacing of float32 requires.

numpy's vectorised functions may differ in the last bit between processors, and so may the draws. If the package was
installed with a C compiler, `normals.c` draws pairs four times as fast, with the same bits on every processor. They may
differ from numpy's in the last two bits. Noise from a published key always uses numpy, so that a training can be
repeated bit for bit without a compiler.
"""

import ctypes
import math
from hashlib import sha256
from importlib.util import find_spec

import numpy as np
import torch
from torch import Tensor

CHUNK = 1 << 17
"""Draws per seed, at 14 bytes of memory each. With smaller chunks, threads would wait for Python's lock."""
MAGNITUDE, SIGN = np.int32(2**30 - 1), np.int32(-(2**31))
"""The lower 30 bits of a word are an angle, and its two highest bits are signs."""


def bits_of(digest: bytes) -> np.random.SFC64:
    """Return the bit generator seeded with a hash."""
    return np.random.SFC64(np.frombuffer(digest[::-1], "<u4"))  # the same seed as the number, in less time


def normals(digest: bytes, chunk: int, count: int, dtype: torch.dtype, compiled: bool = False) -> Tensor:
    """Return the first `count` draws of N(0, 1), float32 or float64 (count,), of chunk number `chunk` of a release.

    `compiled` uses `COMPILED` if it is available.
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
    """Set `sums` to ``(sums + std · drawn) / divisor``, both (n,) float32 or float64. Overwrites `drawn`."""
    if compiled and COMPILED is not None and sums.dtype == np.float32 and sums.flags.c_contiguous:
        COMPILED.add_scaled(sums.ctypes.data, drawn.ctypes.data, std, divisor, len(sums))
        return
    drawn *= drawn.dtype.type(std)
    sums += drawn
    if divisor != 1.0:
        sums /= sums.dtype.type(divisor)


def _library() -> ctypes.CDLL | None:
    """The compiled `normals.c`; None if it was not built."""
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
    """`box_muller`, by `COMPILED`."""
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
    whole, sine = uniform.view(np.int32)[:n], uniform.view(np.float32)[n:]  # reuse the memory of the uniform numbers
    for half, flipped, sign in ((drawn[:n], np.int32(0), 0), (radius, MAGNITUDE, 1)):
        np.bitwise_and(angles, MAGNITUDE, out=whole)
        whole ^= flipped
        np.add(whole, np.float32(0.5), out=sine, dtype=np.float32, casting="same_kind")
        sine *= np.float32(math.pi * 2.0**-31)  # an angle in (0, π/2), or π/2 minus the angle
        np.sin(sine, out=sine)
        np.multiply(sine, radius, out=half)
        np.left_shift(angles, sign, out=whole)
        whole &= SIGN
        half.view(np.int32)[:] ^= whole
    return drawn
