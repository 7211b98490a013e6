"""Examples without a finite gradient add nothing and are counted; the run goes on."""

import math
import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from groupwise.clipping import groups, verify
from tests.training.test_step import (
    ADAPTIVE_BLOCK,
    ADAPTIVE_FLAT,
    ADAPTIVE_LAYER,
    FIXED_LAYER,
    FLAT,
    GHOST,
    make_trainer,
)
from trust.faults.examples import MODES, Case, not_finite, sound


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
def test_the_sum_stays_within_its_bound(mode, seed):
    assert sound(Case(mode, random.Random(seed)))


@pytest.fixture
def careless(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rule that clips what is not finite like anything else."""
    monkeypatch.setattr(groups, "keep_finite", lambda factors, *_: factors)


def test_a_rule_that_keeps_them_is_caught(careless):
    assert not sound(Case(MODES[0], random.Random(0)))
    assert not_finite(3).lost == 3


@pytest.fixture(
    params=[FLAT, GHOST, FIXED_LAYER, ADAPTIVE_LAYER, ADAPTIVE_BLOCK, ADAPTIVE_FLAT], ids=lambda clip: clip.name
)
def pair(request) -> Iterator[tuple]:
    """Trainers that differ in one drawn example: NaN in the first, not there in the second."""
    bad, good = make_trainer(request.param), make_trainer(request.param)
    drawn = bad.private.sampler.indices(0)
    bad.task.x[drawn[1]] = math.nan
    bad.private.sampler.indices = lambda step: drawn
    good.private.sampler.indices = lambda step: np.delete(drawn, 1)
    yield bad, good
    for trainer in (bad, good):
        trainer.private.engine.detach()


def test_a_run_goes_on_as_if_the_example_were_not_there(pair):
    reports = []
    for trainer in pair:
        reports.append(trainer.report(trainer.step(0)))
    assert [report["nonprivate/nonfinite"] for report in reports] == [1, 0]
    for a, b in zip(*(trainer.task.model.parameters() for trainer in pair), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)
    assert all(bool(trainer.private.thresholds.clip_thresholds.isfinite().all()) for trainer in pair)


def test_the_check_before_training_bears_them_too(pair):
    bad, _ = pair
    bad.task.x[:2] = torch.tensor([math.nan, math.inf]).double().unsqueeze(1)
    verify(bad.private.engine, bad.task.losses_of, range(3))
