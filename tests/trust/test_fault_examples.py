"""Examples with non-finite gradients add nothing to a sum and are counted."""

import random

import pytest

from groupwise.clipping import group_pass
from trust.faults.examples import MODES, Case, not_finite, sound


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
def test_sum_stays_within_its_bound(mode, seed):
    assert sound(Case(mode, random.Random(seed)))


@pytest.fixture
def without_dropping(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clips non-finite gradients like all others."""
    monkeypatch.setattr(group_pass, "keep_finite", lambda factors, *_: factors)


def test_engine_that_keeps_nonfinite_gradients_is_caught(without_dropping):
    assert not sound(Case(MODES[0], random.Random(0)))
    assert not_finite(3).lost == 3
