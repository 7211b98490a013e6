"""Clip rules: pure functions that never let factor · norm exceed the threshold."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from groupwise.clipping import automatic_factors, clip_factors
from groupwise.clipping.factors import keep_finite, scale_rows, weigh_rows

positive = st.floats(1e-20, 1e20)


@given(st.lists(st.floats(0, 1e20), min_size=1), positive, st.sampled_from([clip_factors, automatic_factors(0.01)]))
def test_the_clipped_norm_is_at_most_the_threshold(norms, threshold, rule):
    norms = torch.tensor(norms, dtype=torch.float64)
    clipped = norms * rule(norms, torch.tensor(threshold, dtype=torch.float64))
    assert bool((clipped <= threshold * (1 + 1e-12)).all())


def test_short_gradients_are_kept_as_they_are():
    assert clip_factors(torch.tensor([0.0, 0.5, 1.0, 2.0]), torch.tensor(1.0)).tolist() == [1.0, 1.0, 1.0, 0.5]


def test_automatic_needs_a_positive_constant():
    with pytest.raises(ValueError, match="gamma > 0"):
        automatic_factors(0.0)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_rows_left_out_add_exactly_nothing(bad):
    rows = torch.tensor([[1.0, 2.0], [bad, 3.0]])
    factors = keep_finite(torch.ones(2), rows.square().sum(1))
    assert factors.tolist() == [1.0, 0.0]
    assert scale_rows(rows, factors).tolist() == [[1.0, 2.0], [0.0, 0.0]]
    assert weigh_rows(factors, rows).tolist() == [1.0, 2.0]
