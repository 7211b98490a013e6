"""Draws standard normals on a CPU: numpy's, the same on every machine, or Box-Muller pairs in half of the time.

Both take their bits from SFC64, a quarter faster here than Philox, which numpy seeds with 128 bits of a hash. torch's
own normals in float32 are as quick as pairs, but end at 5.77 standard deviations, as their radius has 24 bits: a
Gaussian passes that once in 10⁸ draws, and a model has millions. numpy's end at 8.2, passed once in 10¹⁵.

A pair is r·cos a, r·sin a with r² = -2 ln u, where u has 63 bits, so that it ends at 9.4, and a has 32. They are
computed in float32 by numpy's vectorised functions, whose last bits may differ from processor to processor. So one
process that has a secret key draws pairs, and what must be drawn again, by other processes or from a published key,
comes from numpy's normals.
"""

import itertools
import math
from collections.abc import Callable, Iterator
from hashlib import sha256
from typing import Any

import numpy as np

ZIGGURAT_CHUNK = 1 << 15
"""Draws in the scratch memory of a thread, as many as torch adds without waking threads of its own."""
PAIRS_CHUNK = 1 << 17
"""The same of pairs: 2.1 MB with what leads to them. Of fewer, two threads would wait for each other's Python; of any
other number, runs that began before would be replayed with other noise."""

SEGMENT = 1 << 21
"""Draws of pairs that one thread makes alone, sixteen chunks; as fixed."""

Draw = Callable[[int], np.ndarray]
"""The next `count` draws, at most a chunk of them, in memory that is written over by the next call."""


def bits_of(digest: bytes) -> np.random.SFC64:
    """The stream of random bits that a hash stands for."""
    return np.random.SFC64(int.from_bytes(digest, "big"))


def ziggurat(digest: bytes, dtype: Any, most: int) -> Draw:
    """numpy's standard normals, float32 or float64, of the stream that a hash stands for; `most` is a chunk."""
    generator = np.random.Generator(bits_of(digest))
    scratch: Any = np.empty(most, dtype)

    def draw(count: int) -> np.ndarray:
        generator.standard_normal(out=scratch[:count], dtype=dtype)
        return scratch[:count]

    return draw


def pairs(digest: bytes, std: float, size: int, segment: int = 0) -> Draw:
    """N(0, `std`²) in float32 for a tensor of `size` entries, from a segment on, in parts of any size."""
    length = min(PAIRS_CHUNK, -(-size // 4) * 4)
    blocks, scratch = _blocks(digest, std, length, segment), np.empty(length, np.float32)
    block, used = scratch, length

    def draw(count: int) -> np.ndarray:
        nonlocal block, used
        if used == count == length:
            return next(blocks)
        taken = 0
        while taken < count:
            if used == length:
                block, used = next(blocks), 0
            part = min(count - taken, length - used)
            scratch[taken : taken + part] = block[used : used + part]
            taken, used = taken + part, used + part
        return scratch[:count]

    return draw


def _blocks(digest: bytes, std: float, length: int, segment: int) -> Iterator[np.ndarray]:
    """Blocks of `length` draws, first all cosines, then all sines, in one memory; each segment has words of its own."""
    block, angle = np.empty(length, np.float32), np.empty(length // 2, np.float32)
    cosines, sines = np.split(block, 2)
    for place in itertools.count(segment):
        bits = bits_of(sha256(digest + place.to_bytes(8, "big")).digest())
        for _ in range(SEGMENT // PAIRS_CHUNK):
            box_muller(*_words(bits, length // 2), cosines, sines, angle, std)
            yield block


def _words(bits: np.random.SFC64, half: int) -> tuple[np.ndarray, np.ndarray]:
    """For each pair 64 bits and 32 bits, int64 and int32, in memory that nobody keeps."""
    words = bits.random_raw(half + half // 2)
    return words[:half].view(np.int64), words[half:].view(np.int32)


def box_muller(
    first: np.ndarray, second: np.ndarray, cosines: np.ndarray, sines: np.ndarray, angle: np.ndarray, std: float
) -> None:
    """Write std·r·cos a and std·r·sin a, float32 (n,), for u = |first|·2⁻⁶³, at least 2⁻⁶⁴, and a = second·2π·2⁻³².

    Args:
        first: words, int64 (n,).
        second: words, int32 (n,).
        cosines: where the first of each pair goes.
        sines: where the second goes.
        angle: scratch memory like them.
        std: the standard deviation.
    """
    radius = sines
    np.copyto(radius, first)
    np.abs(radius, out=radius)
    radius *= np.float32(2.0**-63)
    np.maximum(radius, np.float32(2.0**-64), out=radius)
    np.log(radius, out=radius)
    radius *= np.float32(-2.0)
    np.sqrt(radius, out=radius)
    radius *= np.float32(std)
    np.copyto(angle, second)
    angle *= np.float32(2.0 * math.pi * 2.0**-32)
    np.cos(angle, out=cosines)
    cosines *= radius
    np.sin(angle, out=angle)
    sines *= angle
