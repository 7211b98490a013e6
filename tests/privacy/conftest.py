"""Fixtures of the privacy tests: empty caches, and a test that noise is normal."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import settings
from scipy import stats

from groupwise.privacy import accounting, calibration

# On a busy machine a first example may be slow.
settings.register_profile("groupwise", deadline=None)
settings.load_profile("groupwise")


@pytest.fixture
def cold():
    """Clear the caches of ε and σ."""
    accounting._composed.cache_clear()
    calibration._search.cache_clear()
    yield
    calibration._search.cache_clear()


@pytest.fixture
def broken_prv(monkeypatch):
    """A PRV accountant that always fails, as prv_accountant does when its quadrature fails."""

    def fail(*_):
        raise RuntimeError("Discrete mean differs from continuous mean significantly.")

    accounting._coarse.cache_clear()
    monkeypatch.setattr(accounting, "_compose", fail)


@pytest.fixture
def follows_normal_only() -> Callable[[np.ndarray, float], None]:
    """(sample, std) -> asserts that the sample passes a test for N(0, std²), and that altered samples fail it."""

    def follows_normal(sample: np.ndarray, std: float) -> bool:
        """Whether a Kolmogorov-Smirnov test lets the sample pass as N(0, std²)."""
        return bool(stats.kstest(np.asarray(sample, dtype=np.float64) / std, "norm").pvalue > 1e-3)

    def check(sample: np.ndarray, std: float) -> None:
        assert follows_normal(sample, std)
        assert not follows_normal(sample, std * 2 / 3)
        assert not follows_normal(sample, std * 3 / 2)
        assert not follows_normal(np.abs(sample), std)
        assert not follows_normal(sample + 0.1 * std, std)

    return check
