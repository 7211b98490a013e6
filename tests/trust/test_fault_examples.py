"""Examples without a finite gradient add nothing and are counted."""

import random

import pytest

from groupwise.clipping import group_pass
from trust.faults.examples import MODES, Case, not_finite, sound


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
def test_the_sum_stays_within_its_bound(mode, seed):
    assert sound(Case(mode, random.Random(seed)))


@pytest.fixture
def careless(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rule that clips what is not finite like anything else."""
    monkeypatch.setattr(group_pass, "keep_finite", lambda factors, *_: factors)


def test_a_rule_that_keeps_them_is_caught(careless):
    assert not sound(Case(MODES[0], random.Random(0)))
    assert not_finite(3).lost == 3
