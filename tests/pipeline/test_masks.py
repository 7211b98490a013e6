"""Dropout masks of a pipeline stage are the same in all passes of a microbatch, and depend on the step."""

import numpy as np
import pytest
import torch

from groupwise.training.ranks import Ranks
from tests.pipeline.ranks import run_ranks
from tests.pipeline.tiny import Case, make_trainer

BATCH = np.arange(6)


def gradients(rank: int, world: int, rematerialize: bool = False, step: int = 0) -> list[torch.Tensor]:
    """Clipped sums of one step with dropout, for any state of the default generator."""
    case = Case(stages=1, rematerialize=rematerialize, dropout=0.4)
    trainer = make_trainer(case, Ranks(), (tuple(BATCH),))
    trainer.private.engine.set_thresholds(0.01)
    torch.rand(1)
    trainer.private.sums.add(trainer.private, step, BATCH)
    return [p.grad.clone() for p in trainer.runner.stage.parameters()]


@pytest.fixture(scope="module")
def expected():
    return run_ranks(gradients, 1)[0]


def test_masks_depend_on_the_step(expected):
    assert all(torch.equal(a, b) for a, b in zip(run_ranks(gradients, 1)[0], expected, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(run_ranks(gradients, 1, False, 1)[0], expected, strict=True))


def test_a_rematerialised_block_has_the_masks_of_its_forward_pass(expected):
    for found, once in zip(run_ranks(gradients, 1, True)[0], expected, strict=True):
        torch.testing.assert_close(found, once, rtol=0, atol=1e-13)
