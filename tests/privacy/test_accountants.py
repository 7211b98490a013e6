"""The closed forms against an independent formula and their own inverse."""

import math

import pytest
from scipy.special import erfcx
from scipy.stats import norm

from groupwise.privacy.accountants import central_limit_mu, gaussian_epsilon


@pytest.mark.parametrize("mu", [0.01, 0.3, 1.0, 20.0, 25.5, 50.0, 300.0])
@pytest.mark.parametrize("delta", [1e-9, 1e-5])
def test_epsilon_is_that_of_balle_and_wang(delta, mu):
    """δ(ε) = Φ(-near) - e^ε Φ(-far), with φ(near)·Φ(-far)/φ(far) for the latter: e^ε would overflow."""
    epsilon = gaussian_epsilon(delta, mu)
    near, far = epsilon / mu - mu / 2, epsilon / mu + mu / 2
    found = norm.sf(near) - norm.pdf(near) * math.sqrt(math.pi / 2) * erfcx(far / math.sqrt(2))
    assert found == pytest.approx(delta, rel=1e-6)


def test_without_sampling_the_central_limit_is_exact():
    assert central_limit_mu(2.0, 1.0, 100) == 5.0
    assert central_limit_mu(2.0, 0.999999, 100) == pytest.approx(10 * math.sqrt(math.expm1(0.25)), rel=1e-5)
