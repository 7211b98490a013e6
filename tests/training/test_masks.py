"""Dropout masks of a private step depend on key, step, microbatch and process, and on no generator of the caller.

`public_masks` in `trust.planted_bugs` measures that the public seed reveals nothing about them.
"""

import pytest
import torch
from torch import Tensor, nn

from groupwise.privacy import NoiseSource
from groupwise.training.ranks import Ranks
from groupwise.training.step import Trainer
from tests.tiny_training import FLAT
from tests.training.test_step import make_trainer


def dropout_trainer(noise_seed: int = 7, microbatch: int = 64) -> Trainer:
    """A trainer of the toy task with dropout."""
    trainer = make_trainer(FLAT, microbatch)
    trainer.task.model[1] = nn.Sequential(nn.Tanh(), nn.Dropout(0.5))
    trainer.private.noise = NoiseSource.from_seed(noise_seed)
    return trainer


def sums(trainer: Trainer, step: int = 0, examples: int = 40) -> Tensor:
    """Clipped gradient sums of the first examples."""
    trainer.private.clear()
    trainer.private.sums.add(trainer.private, step, torch.arange(examples).numpy())
    return torch.cat([parameter.grad.flatten() for parameter in trainer.task.model.parameters()])


def test_masks_depend_on_key_step_and_microbatch_and_not_on_the_seed():
    trainer = dropout_trainer()
    found = sums(trainer)
    torch.manual_seed(5)
    assert torch.equal(sums(trainer), found), "a replayed step repeats its masks"
    assert not torch.equal(sums(trainer, 1), found), "another step has others"
    assert not torch.equal(sums(dropout_trainer(noise_seed=2)), found), "another key has others"
    trainer.task.x[20:40], trainer.task.y[20:40] = trainer.task.x[:20], trainer.task.y[:20]
    halves = dropout_trainer(microbatch=20)
    halves.task.x, halves.task.y = trainer.task.x, trainer.task.y
    assert not torch.allclose(sums(halves), 2 * sums(halves, examples=20)), "another microbatch has others"


@pytest.mark.parametrize("process", [(0, 1, 2), (1, 0, 1), (0, 0, 1)], ids=str)
def test_every_process_has_different_masks(process):
    trainer = dropout_trainer()
    alone = sums(trainer)

    ranks = trainer.private.ranks = Ranks()
    ranks.replica, ranks.stage, ranks.stages = process
    assert torch.equal(sums(trainer), alone) == (process == (0, 0, 1))
