"""Masks of a private step follow its key, step, microbatch and process, and no generator of the caller's.

That whoever knows the public seed learns nothing from them is measured by `trust.planted_bugs`, `public_masks`.
"""

import pytest
import torch
from torch import Tensor, nn

from groupwise.privacy import NoiseSource
from groupwise.training.ranks import Ranks
from groupwise.training.step import Trainer
from tests.tiny_training import FLAT
from tests.training.test_step import make_trainer


def trainer(noise_seed: int = 7, microbatch: int = 64) -> Trainer:
    """The toy task behind dropout."""
    made = make_trainer(FLAT, microbatch)
    made.task.model[1] = nn.Sequential(nn.Tanh(), nn.Dropout(0.5))
    made.private.noise = NoiseSource.from_seed(noise_seed)
    return made


def sums(made: Trainer, step: int = 0, examples: int = 40) -> Tensor:
    """Clipped sums of the first examples."""
    made.private.clear()
    made.private.sums.add(made.private, step, torch.arange(examples).numpy())
    return torch.cat([parameter.grad.flatten() for parameter in made.task.model.parameters()])


def test_masks_follow_the_key_the_step_and_the_microbatch_and_not_the_seed():
    made = trainer()
    found = sums(made)
    torch.manual_seed(5)
    assert torch.equal(sums(made), found), "a replayed step repeats its masks"
    assert not torch.equal(sums(made, 1), found), "another step has others"
    assert not torch.equal(sums(trainer(noise_seed=2)), found), "another key has others"
    made.task.x[20:40], made.task.y[20:40] = made.task.x[:20], made.task.y[:20]
    halves = trainer(microbatch=20)
    halves.task.x, halves.task.y = made.task.x, made.task.y
    assert not torch.allclose(sums(halves), 2 * sums(halves, examples=20)), "another microbatch has others"


@pytest.mark.parametrize("process", [(0, 1, 2), (1, 0, 1), (0, 0, 1)], ids=str)
def test_every_process_has_masks_of_its_own(process):
    made = trainer()
    alone = sums(made)

    ranks = made.private.ranks = Ranks()
    ranks.replica, ranks.stage, ranks.stages = process
    assert torch.equal(sums(made), alone) == (process == (0, 0, 1))
