"""Masks of a private step are secret: whoever knows the public seed cannot tell two neighbouring data sets apart."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from groupwise.audit.canaries import Present
from groupwise.audit.two_worlds import TrainerWorld, distinguish
from groupwise.build import build_trainer
from groupwise.config.schema import ClipConfig, OptimConfig, RunConfig
from groupwise.run import plan_run
from groupwise.training.from_config import make_engine
from groupwise.training.ranks import Alone
from tests.checked import checked_once
from tests.tiny_training import Trained

OTHERS, WIDTH, RATE, SEED = 63, 32, 0.5, 0
EPSILON, PLAYS = 1.0, 200
FLAT = ClipConfig("flat", grouping="flat", policy="fixed", threshold=1.0, rescale=False)


def inputs(examples: np.ndarray) -> Tensor:
    """(n, WIDTH)."""
    return torch.as_tensor(1.0 - 2.0 * (examples % 2)).unsqueeze(1).expand(-1, WIDTH)


class DroppedOut(Trained):
    """A linear loss behind dropout, so that the gradient of an example is its masked input.

    The examples are ±1 in turn, and the last is taken first, as the longest text is: with it, everybody else's mask is
    that of the next if masks are dealt in the order of the batch.
    """

    def __init__(self) -> None:
        self.model = nn.Sequential(nn.Dropout(RATE), nn.Linear(WIDTH, 1, bias=False)).double()
        nn.init.zeros_(self.model[1].weight)
        self.train_size = OTHERS + 1

    def read(self, examples, even=False):
        return inputs(np.asarray(examples))

    def losses(self, model, batch):
        return model(batch).squeeze(1)

    def order(self, examples: np.ndarray) -> np.ndarray:
        return examples[::-1]


def trainer(having: bool, noise_seed: int, microbatch: int = OTHERS + 1):
    """One full batch in expectation, of the data with the last example or without it."""
    config = RunConfig(clip=FLAT, seed=SEED, optim=OptimConfig(learning_rate=1.0))
    config.privacy.epsilon, config.privacy.delta = EPSILON, 1e-5
    config.train.sample_rate, config.train.batch_size, config.train.steps = 1.0, None, 1
    config.train.microbatch, config.debug.noise_seed = microbatch, noise_seed
    task = DroppedOut()
    engine = make_engine(task.model, config.clip)
    plan = plan_run(config, task.train_size, 1)
    with checked_once("dropped out"):
        made = build_trainer(config, task, engine, plan, torch.device("cpu"), Alone(), None)
    present = np.ones(OTHERS + 1, dtype=bool)
    present[-1] = having
    made.private.sampler = Present(made.private.sampler, present)
    return made


def sum_under_public_masks(examples: int) -> Tensor:
    """The clipped sum, (WIDTH,), if masks were dealt from the public seed in the order of the batch."""
    torch.manual_seed(SEED)
    rows = F.dropout(inputs(np.arange(examples)[::-1].copy()), RATE)
    return (rows / rows.norm(dim=1, keepdim=True).clamp(min=1.0)).sum(0)


def world(having: bool, noise_seed: int) -> TrainerWorld:
    """Every play is a run of its own, which begins at the public seed as `make_task` leaves it."""
    made = trainer(having, noise_seed)
    moved = sum_under_public_masks(OTHERS + 1) - sum_under_public_masks(OTHERS)
    assert moved.norm() > 5, "one more example moves everybody's public masks"

    def run(step: int) -> None:
        torch.manual_seed(SEED)
        made.step(step)

    return TrainerWorld([made], 1, lambda releases: float(releases[0].update @ moved), run)


def test_an_attacker_who_deals_masks_from_the_public_seed_learns_nothing_beyond_the_claim():
    """A right mechanism fails with probability 0.05 at most, and this one is fixed by its seeds.

    Masks from the public seed give a bound of 2.4, or 11 if the release were Gaussian.
    """
    found = distinguish(world(False, 1), world(True, 2), PLAYS, 1e-5)
    assert found.epsilon <= EPSILON
    assert found.gaussian_epsilon <= EPSILON


def gradient(made, step: int = 0) -> Tensor:
    made.private.sums.add(made.private, step, np.arange(OTHERS + 1))
    return made.task.model[1].weight.grad.clone()


def test_masks_follow_the_key_the_step_and_the_microbatch_and_not_the_seed():
    made = trainer(True, 1)
    found = gradient(made)
    torch.manual_seed(5)
    assert torch.equal(gradient(made), found), "a replayed step repeats its masks"
    assert not torch.equal(gradient(made, 1), found), "another step has others"
    assert not torch.equal(gradient(trainer(True, 2)), found), "another key has others"
    halves = trainer(True, 1, microbatch=(OTHERS + 1) // 2)
    rows = np.arange((OTHERS + 1) // 2)
    halves.private.sums.add(halves.private, 0, rows)
    first = halves.task.model[1].weight.grad.clone()
    assert not torch.allclose(gradient(halves), 2 * first), "another microbatch has others"


@pytest.mark.parametrize("process", [(0, 1, 2), (1, 0, 1), (0, 0, 1)], ids=str)
def test_every_process_has_masks_of_its_own(process):
    made = trainer(True, 1)
    alone = gradient(made)

    class Other(Alone):
        replica, stage, stages = process

    made.private.ranks = Other()
    assert torch.equal(gradient(made), alone) == (process == (0, 0, 1))


def test_a_resumed_run_is_the_undisturbed_one_whatever_the_generators_are():
    whole, first, resumed = (trainer(True, 1, microbatch=20) for _ in range(3))
    for step in range(3):
        whole.step(step)
    first.step(0)
    torch.manual_seed(9)
    resumed.load_state_dict(first.state_dict())
    for step in (1, 2):
        resumed.step(step)
    assert torch.equal(resumed.task.model[1].weight, whole.task.model[1].weight)


def test_a_step_leaves_no_trace_of_its_masks_in_the_generators():
    made = trainer(True, 1)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    made.step(0)
    assert torch.equal(torch.get_rng_state(), before)
    assert "random" not in made.state_dict()
