"""Fewer triples of what is tried, in which every two of their values still meet."""

from collections.abc import Iterable, Sequence

import pytest


def in_turn(names: Iterable[str], modes: Sequence[str], sizes: Sequence[float]) -> list[object]:
    """Parameters (name, mode, some of `sizes`) with every pair of values of the three; all other triples are slow."""
    modulus = min(len(modes), len(sizes))
    parameters = []
    for n, name in enumerate(names):
        for m, mode in enumerate(modes):
            for marks, wanted in (([], {0}), ([pytest.mark.slow], set(range(1, modulus)))):
                given = [size for k, size in enumerate(sizes) if (k + m + n) % modulus in wanted]
                parameters.append(pytest.param(name, mode, given, id=f"{name}-{mode}-{given}", marks=marks))
    return parameters
