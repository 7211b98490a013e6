"""How examples fill microbatches, and what is left over."""

import numpy as np
import pytest

from groupwise.training.task import fill, rounded


@pytest.mark.parametrize(
    ("count", "size", "least", "rows", "absent"),
    [
        (5, 2, 1, [[0, 1], [2, 3], [4, 4]], [0, 0, 1]),
        (4, 2, 1, [[0, 1], [2, 3]], [0, 0]),
        (3, 2, 4, [[0, 1], [2, 2], [2, 2], [2, 2]], [0, 1, 2, 2]),
        (1, 3, 1, [[0, 0, 0]], [2]),
    ],
)
def test_fillers_are_at_the_end(count, size, least, rows, absent):
    filling = fill(np.arange(count), size, least)
    assert filling.rows.tolist() == rows
    assert filling.absent.tolist() == absent


def test_lengths_go_up_to_a_multiple_of_eight_but_not_beyond_the_most():
    assert [rounded(n, 30) for n in (1, 8, 9, 24, 25, 30)] == [8, 8, 16, 24, 30, 30]
