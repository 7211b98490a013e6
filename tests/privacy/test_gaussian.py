"""The closed forms against an independent formula and their own inverse."""

import math

import pytest
from scipy.special import erfcx
from scipy.stats import norm

from groupwise.privacy.accountants import central_limit_mu, gaussian_delta, gaussian_epsilon


@pytest.mark.parametrize("mu", [0.05, 0.5, 1.0, 5.0])
@pytest.mark.parametrize("epsilon", [0.0, 0.1, 1.0, 8.0])
def test_delta_is_that_of_balle_and_wang(epsilon, mu):
    expected = norm.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon) * norm.cdf(-mu / 2 - epsilon / mu)
    assert gaussian_delta(epsilon, mu) == pytest.approx(expected, rel=1e-6, abs=1e-15)


@pytest.mark.parametrize("mu", [0.01, 0.3, 1.0, 20.0, 200.0])
def test_epsilon_inverts_delta(mu):
    epsilon = gaussian_epsilon(1e-5, mu)
    assert gaussian_delta(epsilon, mu) == pytest.approx(1e-5, rel=1e-6)


def test_a_large_delta_costs_nothing():
    assert gaussian_epsilon(0.5, 0.1) == 0.0
    assert gaussian_delta(1.0, 0.0) == 0.0


def test_without_sampling_the_central_limit_is_exact():
    assert central_limit_mu(2.0, 1.0, 100) == 5.0
    assert central_limit_mu(2.0, 0.999999, 100) == pytest.approx(10 * math.sqrt(math.expm1(0.25)), rel=1e-5)


@pytest.mark.parametrize("mu", [20.0, 25.5, 30.0, 50.0, 300.0])
@pytest.mark.parametrize("near", [0.0, 0.3, 2.0])
def test_delta_where_the_exponential_would_overflow(mu, near):
    """φ(near)·Φ(-far)/φ(far) by scipy's scaled error function, which knows no series."""
    far = near + mu
    expected = norm.sf(near) - norm.pdf(near) * math.sqrt(math.pi / 2) * erfcx(far / math.sqrt(2))
    assert gaussian_delta((near + mu / 2) * mu, mu) == pytest.approx(expected, rel=3e-8)


def test_epsilon_is_found_to_the_last_digits():
    for mu in (0.01, 0.3, 4.0):
        epsilon = gaussian_epsilon(1e-5, mu)
        assert gaussian_delta(epsilon * (1 + 1e-10), mu) < 1e-5 < gaussian_delta(epsilon * (1 - 1e-10), mu)


def test_with_hardly_any_noise_the_central_limit_stays_finite():
    assert math.isfinite(central_limit_mu(0.02, 0.01, 10))
    assert central_limit_mu(0.1, 0.01, 9) == pytest.approx(0.03 * math.sqrt(math.expm1(100.0)))
