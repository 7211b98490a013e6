"""Two-worlds bounds are below the true ε of known mechanisms, and above the claim if the noise is too small."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from groupwise.audit.two_worlds import TrainerWorld, distinguish
from groupwise.config.schema import ClipConfig, OptimConfig
from groupwise.privacy import AdaptiveThresholds, NoiseSource, PoissonSampler
from groupwise.privacy.accountants import gaussian_epsilon
from groupwise.training.step import Trainer
from tests.tiny_training import Trained, trainer_of
from trust.planted_bugs.worst import CountWorld

DELTA, GROUPS, SIGMA_B, ROWS = 1e-5, 4, 2.0, 3
ADAPTIVE = ClipConfig(grouping="flat", threshold=1.0, rescale=False, quantile_budget=0.5)


class OneLayer(Trained):
    """A task whose per-example gradients are the rows of the identity matrix."""

    train_size = ROWS

    def __init__(self) -> None:
        self.model = nn.Linear(ROWS, 1, bias=False).double()

    def read(self, examples, even=False):
        return torch.eye(ROWS, dtype=torch.float64)[np.asarray(examples)]

    def losses(self, model, batch):
        return model(batch).squeeze(1)


def trainer(sigma: float = 1.0, rate: float = 1.0) -> Trainer:
    torch.manual_seed(0)
    optim = OptimConfig(learning_rate=1.0)
    trainer = trainer_of(OneLayer(), ADAPTIVE, optim, batch_size=rate * ROWS, steps=2, sigma=sigma, microbatch=8)
    trainer.private.sampler = PoissonSampler(ROWS, trainer.private.plan.sample_rate, 3)
    return trainer


def counting(examples: int, seed: int, sigma: float = SIGMA_B) -> CountWorld:
    policy = AdaptiveThresholds([1.0] * GROUPS, 0.5, 0.3, sigma, 9)
    return CountWorld(policy, torch.full((GROUPS,), examples), examples, NoiseSource.from_seed(seed))


@pytest.mark.parametrize("strange", [math.nan, math.inf, -math.inf])
def test_non_finite_score_gives_no_bound(strange):
    worlds = [lambda score=score: score for score in (0.0, strange)]
    assert distinguish(*worlds, 50, DELTA) == 0


def test_counts_reveal_no_more_than_their_share_of_the_budget():
    truth = gaussian_epsilon(DELTA, 0.5 * math.sqrt(GROUPS) / SIGMA_B)
    assert 0 < distinguish(counting(8, 0), counting(9, 1), 8000, DELTA) <= truth
    narrow = distinguish(counting(8, 0, SIGMA_B / 8), counting(9, 1, SIGMA_B / 8), 400, DELTA)
    assert narrow > truth


def test_plays_start_from_the_same_weights_and_record_every_release():
    seen = []
    real = trainer()
    start = real.task.model.weight.detach().clone()

    def score(releases):
        seen.append(releases)
        return 0.0

    world = TrainerWorld([real], 2, score)
    for _ in range(3):
        world()
    for releases in seen:
        first, second = releases
        assert first.update.shape == (ROWS,) and first.thresholds.shape == (1,)
        assert not torch.equal(first.thresholds, second.thresholds)
    moved = start.flatten() - seen[-1][0].update - seen[-1][1].update
    torch.testing.assert_close(moved, real.task.model.weight.detach().flatten())
    noises = torch.stack([releases[0].update for releases in seen])
    assert len(torch.unique(noises, dim=0)) == 3  # fresh noise each time
