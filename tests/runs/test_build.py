"""The examples that are looked at before training are of different kinds, the longest first, and never too many."""

import numpy as np
import pytest

from groupwise.build import CHECKED, examples_to_check


@pytest.mark.parametrize("size", [1, 2, 3, 5, 6, 1000])
def test_longest_shortest_first_and_last(size):
    order = np.random.default_rng(0).permutation(size)
    chosen = examples_to_check(order)
    assert len(chosen) == len(set(chosen)) and min(size, CHECKED) <= len(chosen) <= CHECKED + 2
    assert chosen[0] == order[0] and {0, size - 1, order[-1]} <= set(chosen[:CHECKED]) and set(chosen) <= set(order)
    assert all(type(i) is int for i in chosen)


def test_all_alike_in_length():
    assert examples_to_check(np.arange(100)) == [0, 99, 50, 25, 75]
