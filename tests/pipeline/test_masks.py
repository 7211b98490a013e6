"""Dropout masks of a pipeline stage are the same in all passes of a microbatch, and depend on the step."""

import numpy as np
import pytest
import torch

from groupwise.training.ranks import Ranks
from tests.pipeline.ranks import run_ranks
from tests.pipeline.tiny import Case, make_trainer

BATCH = np.arange(6)


def gradients(rematerialize: bool = False, step: int = 0) -> list[torch.Tensor]:
    """As `on_one_process`."""
    return run_ranks(on_one_process, 1, rematerialize, step)[0]


def on_one_process(rank: int, world: int, rematerialize: bool, step: int) -> list[torch.Tensor]:
    """Clipped sums of one step with dropout, for any state of the default generator."""
    case = Case(stages=1, rematerialize=rematerialize, dropout=0.4)
    trainer = make_trainer(case, Ranks(), (tuple(BATCH),))
    trainer.private.engine.set_thresholds(0.01)
    torch.rand(1)
    trainer.private.sums.add(trainer.private, step, BATCH)
    return [p.grad.clone() for p in trainer.runner.stage.parameters()]


@pytest.fixture(scope="module")
def expected():
    return gradients()


def test_masks_depend_on_the_step(expected):
    assert all(torch.equal(a, b) for a, b in zip(gradients(), expected, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(gradients(step=1), expected, strict=True))


def test_a_rematerialised_block_has_the_masks_of_its_forward_pass(expected):
    for found, once in zip(gradients(rematerialize=True), expected, strict=True):
        torch.testing.assert_close(found, once, rtol=0, atol=1e-13)
