"""Thresholds that follow public examples: of the released weights alone, whatever the private data are."""

import random
from contextlib import nullcontext
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from groupwise import make_private
from groupwise.audit.two_worlds import TrainerWorld, distinguish
from groupwise.build import build_trainer
from groupwise.config.schema import ClipConfig, DebugConfig, OptimConfig, RunConfig, TrainConfig
from groupwise.data.images import normalize
from groupwise.errors import UserError
from groupwise.privacy import NoiseSource, PublicThresholds, make_plan
from groupwise.tasks.image_classification import ImageClassification
from groupwise.training.from_config import make_engine
from groupwise.training.mechanism import Mechanism
from groupwise.training.ranks import Alone
from groupwise.training.step import Trainer
from groupwise.training.task import Task
from tests.checked import checked_once

EXAMPLES, COUNT, STEPS, C = 24, 7, 5, 0.8
CLIP = ClipConfig("public_layer", policy="public", threshold=C, public_examples=COUNT, public_every=2)


class Toy(Task):
    """Classification of random points by a small float64 network with dropout and a buffer that it moves."""

    train_size = EXAMPLES

    def __init__(self, data: int = 0) -> None:
        torch.manual_seed(0)
        layers = nn.Linear(5, 8), nn.Tanh(), nn.Dropout(0.3), nn.LayerNorm(8), nn.Linear(8, 3)
        self.model = nn.Sequential(*layers).double()
        torch.manual_seed(1 + data)
        self.x, self.y = 10.0**data * torch.randn(EXAMPLES, 5).double(), torch.randint(0, 3, (EXAMPLES,))

    def losses(self, examples):
        rows = torch.as_tensor(np.asarray(examples))
        return F.cross_entropy(self.model(self.x[rows]), self.y[rows], reduction="none")

    def public_losses(self, count):
        x, y = torch.randn(count, 5).double(), torch.randint(0, 3, (count,))
        return F.cross_entropy(self.model(x), y, reduction="none")

    def evaluate(self, split, batch_size, limit=None, final=False):
        return {}

    def describe_data(self):
        return {}


def make_trainer(clip: ClipConfig = CLIP, data: int = 0, sigma: float = 1.0) -> Trainer:
    config = RunConfig(
        clip=clip,
        optim=OptimConfig(learning_rate=0.5),
        train=TrainConfig(microbatch=8),
        debug=DebugConfig(noise_seed=7),
    )
    task = Toy(data)
    engine = make_engine(task.model, clip)
    plan = make_plan(
        dataset_size=EXAMPLES,
        expected_batch_size=12,
        steps=STEPS,
        delta=1e-5,
        noise_multiplier=sigma,
        num_groups=len(engine.groups),
        quantile_budget=0.0,
        accountant="rdp",
    )
    with checked_once(clip.policy):
        return build_trainer(config, task, engine, plan, torch.device("cpu"), Alone(), None)


def weights(trainer: Trainer) -> Tensor:
    return torch.cat([p.detach().flatten() for p in trainer.task.model.parameters()])


def by_hand(trainer: Trainer, step: int) -> Tensor:
    """C_k ∝ (median norm)^½ by a loop over the step's made-up examples, in float64."""
    model, squares = trainer.task.model, []
    with trainer.engine.bypassed(), torch.random.fork_rng():
        torch.manual_seed(step)
        for loss in trainer.task.public_losses(COUNT):
            found = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
            squares.append([sum(g.square().sum() for g in found[i : i + 2]) for i in (0, 2, 4)])
    shares = torch.tensor(squares).sqrt().median(0).values.sqrt()
    return C * shares / shares.norm()


def test_thresholds_are_those_of_a_loop_at_the_released_weights_and_move_when_they_are_due():
    trainer = make_trainer()
    for step in range(STEPS):
        due = by_hand(trainer, step - step % 2) if step % 2 == 0 else trainer.thresholds.clip_thresholds
        trainer.step(step)
        torch.testing.assert_close(trainer.thresholds.clip_thresholds, due, rtol=1e-9, atol=0)
        torch.testing.assert_close(trainer.engine.thresholds, due, rtol=1e-6, atol=0)
        assert float(due.norm()) == pytest.approx(C)
        released = trainer.engine.sensitivity("add_remove")
        torch.testing.assert_close(released.thresholds, due, rtol=1e-9, atol=0)  # the noise takes those that clip


def test_power_zero_is_fixed_thresholds_bit_for_bit_so_that_nothing_else_moves():
    still = make_trainer(ClipConfig(policy="public", threshold=C, public_every=1, public_power=0.0))
    fixed = make_trainer(ClipConfig(policy="fixed", threshold=C))
    for step in range(STEPS):
        still.step(step)
        fixed.step(step)
    assert torch.equal(weights(still), weights(fixed))


def test_private_data_move_no_threshold_but_through_the_weights():
    one, other = make_trainer(data=0), make_trainer(data=1)
    assert torch.equal(one.thresholds.clip_thresholds, other.thresholds.clip_thresholds)
    for step in range(2):
        one.step(step)
        other.step(step)
    other.task.model.load_state_dict(one.task.model.state_dict())
    one.step(2)
    other.step(2)
    assert torch.equal(one.thresholds.clip_thresholds, other.thresholds.clip_thresholds)
    assert not torch.equal(one.thresholds.clip_thresholds, make_trainer().thresholds.clip_thresholds)


def world(present: int, planted: bool) -> TrainerWorld:
    """Releases of full batches of a run; with the fault thresholds follow the last two examples, if they are there."""
    trainer = make_trainer(ClipConfig(policy="public", threshold=C, public_every=1), sigma=40.0)
    trainer.task.x[-1] *= 1e3  # the canary: it saturates the first layer, which has no gradient then
    if planted:
        trainer.mechanism.public = partial(trainer.task.losses, range(EXAMPLES - 2, present))
    trainer.mechanism.sampler = Everybody(present)
    first_against_last = torch.tensor([-1.0, 0.0, 1.0], dtype=torch.float64)
    return TrainerWorld([trainer], 1, lambda releases: float(releases[-1].thresholds.log() @ first_against_last))


PLAYS = 40  # of each world: if all are told apart, that shows 1.59 at 95 %


class Everybody:
    def __init__(self, present: int) -> None:
        self.present = present

    def indices(self, step):
        return np.arange(self.present)


def test_two_worlds_are_told_apart_by_thresholds_that_follow_private_examples_and_by_no_others():
    told = distinguish(world(EXAMPLES - 1, False), world(EXAMPLES, False), PLAYS, 1e-5)
    caught = distinguish(world(EXAMPLES - 1, True), world(EXAMPLES, True), PLAYS, 1e-5)
    assert told.epsilon == 0.0
    assert caught.epsilon > 1.5  # where sigma = 40 claims 0.04


def test_a_resumed_run_is_the_undisturbed_one():
    whole, first, then = make_trainer(), make_trainer(), make_trainer()
    for step in range(STEPS):
        whole.step(step)
    for step in range(3):  # between two moves
        first.step(step)
    then.load_state_dict(first.state_dict(), 3)
    for step in range(3, STEPS):
        then.step(step)
    assert torch.equal(weights(then), weights(whole))
    assert torch.equal(then.thresholds.clip_thresholds, whole.thresholds.clip_thresholds)


def test_generators_gradients_counts_and_buffers_are_as_before():
    trainer = make_trainer()
    trainer.task.model.register_buffer("calls", torch.zeros(()))
    trainer.task.model.register_forward_pre_hook(lambda model, _: model.calls.add_(1) and None)
    trainer.task.model[0].bias.grad = gradient = torch.ones(8).double()
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist(), trainer.engine.examples
    trainer.mechanism.follow_public(0)
    after = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist(), trainer.engine.examples
    assert torch.equal(before[0], after[0]) and before[1:] == after[1:]
    assert bool((gradient == 1).all()) and trainer.task.model[0].weight.grad is None
    assert trainer.task.model.calls == 0 and not bool(trainer.engine.counts.any())


class Second(Alone):
    """A replica that is told what the main process measured."""

    def broadcast(self, value):
        return torch.tensor([[1.0], [16.0], [4.0]]) if isinstance(value, Tensor) else value


def test_replicas_take_the_norms_of_the_main_process():
    mechanism = make_trainer().mechanism
    mechanism.ranks = Second()
    mechanism.follow_public(0)
    shares = torch.tensor([1.0, 4.0, 2.0]).double()
    torch.testing.assert_close(mechanism.thresholds.clip_thresholds, C * shares / shares.norm())


def test_a_task_without_such_examples_is_refused_before_training():
    class Poor(Toy):
        public_losses = Task.public_losses

    task = Poor()
    with pytest.raises(UserError, match="Poor has none of: write its public_losses"):
        task.public_losses(3)


# -- in a loop of one's own -------------------------------------------------------------------------------------------


def private(**options):
    toy = Toy()
    optimizer = torch.optim.SGD(toy.model.parameters(), lr=0.5)
    data = list(zip(toy.x, toy.y, strict=True))
    settings = {"noise_multiplier": 1.0, "steps": 4, "batch_size": 12, "accountant": "rdp", "delta": 1e-3}
    given = {
        "public": partial(toy.public_losses, COUNT),
        "clip": "public_layer",
        "noise_source": NoiseSource.from_seed(3),
    }
    return toy, make_private(toy.model, optimizer, data, **settings, **{**given, **options})


def test_a_loop_of_ones_own_spends_nothing_on_thresholds_and_moves_them():
    toy, training = private(public_every=1)
    assert training.plan.quantile_budget == 0.0
    assert training.plan.gradient_noise_multiplier == training.plan.noise_multiplier == 1.0
    start = training.engine.thresholds
    for x, y in training.batches(6):
        training.backward(F.cross_entropy(toy.model(x), y, reduction="none"))
        training.step()
    assert isinstance(training.mechanism, Mechanism) and isinstance(training.mechanism.thresholds, PublicThresholds)
    assert not torch.allclose(training.engine.thresholds, start)
    assert float(training.engine.thresholds.norm()) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"public": None}, "has no public= to follow"),
        ({"clip": "fixed_layer"}, "follows no public examples, which were given"),
        ({"clip": "flat", "policy": "public"}, "moves no threshold"),
        ({"public": lambda: torch.ones(())}, "one value per example"),
    ],
)
def test_what_does_not_go_together_is_refused_and_the_model_is_free(options, says):
    with pytest.raises(UserError, match=says):
        private(**options)
    toy = Toy()
    with pytest.raises(UserError):
        make_private(toy.model, torch.optim.SGD(toy.model.parameters()), [0], noise_multiplier=1.0, **options)
    assert "forward" not in vars(toy.model) and "forward" not in vars(toy.model[0])


def test_made_up_images_have_the_shape_of_the_data_and_nothing_else_of_them():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 16, 5))

    def losses(value):
        images, labels = torch.full((4, 3, 4, 4), value, dtype=torch.uint8), torch.zeros(4, dtype=torch.int64)
        prepare = partial(normalize, mean=(0.5,) * 3, std=(0.5,) * 3)
        task = ImageClassification(model, (images, labels), (images, labels), prepare, {}, nullcontext)
        torch.manual_seed(1)
        return task.public_losses(6)

    found = losses(0)
    assert found.shape == (6,) and found.requires_grad and len({*found.tolist()}) == 6
    assert torch.equal(found, losses(255))
