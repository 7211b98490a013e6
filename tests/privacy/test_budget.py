"""σ split between counts and gradients: 1/σ_new² + K/(4σ_b²) = 1/σ²."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from groupwise.errors import UserError
from groupwise.privacy.calibration import split_noise


@given(sigma=st.floats(0.01, 1e4), groups=st.integers(1, 10_000), share=st.floats(1e-6, 0.999))
def test_both_releases_together_cost_one_at_sigma(sigma, groups, share):
    count, gradient = split_noise(sigma, groups, share)
    assert 1 / gradient**2 + groups / (4 * count**2) == pytest.approx(1 / sigma**2, rel=1e-9)
    assert groups * sigma**2 / (4 * count**2) == pytest.approx(share, rel=1e-9)


def test_the_formulas_of_the_paper():
    assert split_noise(2.0, 16, 0.01) == pytest.approx((2.0 * math.sqrt(16 / 0.04), 2.0 / math.sqrt(0.99)))


def test_raw_counts_would_not_fit_the_budget():
    """Uncentred counts have sensitivity √K: four times the share that was set aside."""
    count, gradient = split_noise(1.0, 5, 0.1)
    assert 1 / gradient**2 + 5 / count**2 == pytest.approx(1.0 + 3 * 0.1)


def test_fixed_thresholds_leave_all_to_the_gradients():
    assert split_noise(1.5, 7, 0.0) == (0.0, 1.5)


@pytest.mark.parametrize("share", [1.0, 1.5, -0.1, math.nan])
def test_a_share_outside_the_budget_is_refused(share):
    with pytest.raises(UserError, match="sigma_b is too small"):
        split_noise(1.0, 3, share)
