"""Parameters of tests in which every pair of values occurs, without all triples."""

from collections.abc import Iterable, Sequence

import pytest


def covering_pairs(names: Iterable[str], modes: Sequence[str], sizes: Sequence[float]) -> list[object]:
    """Parameters (name, mode, some of `sizes`) that cover every pair of values; all other triples are slow tests."""
    modulus = min(len(modes), len(sizes))
    parameters = []
    for n, name in enumerate(names):
        for m, mode in enumerate(modes):
            for marks, wanted in (([], {0}), ([pytest.mark.slow], set(range(1, modulus)))):
                given = [size for k, size in enumerate(sizes) if (k + m + n) % modulus in wanted]
                parameters.append(pytest.param(name, mode, given, id=f"{name}-{mode}-{given}", marks=marks))
    return parameters
