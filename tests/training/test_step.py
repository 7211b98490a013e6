"""One logical batch, one release: however it is cut into microbatches, whatever computes the norms."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from groupwise.config.schema import ClipConfig, OptimConfig
from groupwise.privacy import NoiseSource, PoissonSampler, make_plan
from groupwise.training import private_step as a_step
from groupwise.training.from_config import make_engine, make_optimizer, make_schedule, make_thresholds
from groupwise.training.microbatches import TaskSums
from groupwise.training.private_step import PrivateStep
from groupwise.training.step import Trainer
from groupwise.training.task import Task

EXAMPLES, BATCH, STEPS = 96, 32, 3
FLAT = ClipConfig("flat", grouping="flat", policy="fixed", threshold=0.5, rescale=False)
GHOST = ClipConfig("ghost", grouping="flat", norms="ghost", policy="fixed", threshold=0.5, rescale=False)
ADAPTIVE_LAYER = ClipConfig(threshold=0.5, quantile_budget=0.1)
ADAPTIVE_FLAT = ClipConfig("adaptive_flat", grouping="flat", threshold=0.5, rescale=False)
ADAPTIVE_BLOCK = ClipConfig("adaptive_block", grouping="block", threshold=0.5)
FIXED_LAYER = ClipConfig("fixed_layer", policy="fixed", threshold=0.5)
NONE = ClipConfig("none", grouping="none", policy="fixed")


class ToyTask(Task):
    """Classification of random points by a small float64 network."""

    train_size = EXAMPLES

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, 3)).double()
        self.x, self.y = torch.randn(EXAMPLES, 5).double(), torch.randint(0, 3, (EXAMPLES,))

    def read(self, examples, even=False):
        rows = torch.as_tensor(np.asarray(examples))
        return {"x": self.x[rows], "y": self.y[rows]}

    def losses(self, model, batch):
        return F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")

    def evaluate(self, split, batch_size, limit=None, final=False):
        return {}

    def describe_data(self):
        return {}


def make_trainer(
    clip: ClipConfig,
    microbatch: int = 64,
    sigma: float = 1.0,
    batch_size: float = BATCH,
    optim: OptimConfig | None = None,
) -> Trainer:
    task, optim = ToyTask(), optim or OptimConfig(learning_rate=0.5)
    engine = make_engine(task.model, clip)
    if engine is not None:
        engine.trace(task.losses_of, range(6))
    plan = make_plan(
        dataset_size=EXAMPLES,
        expected_batch_size=batch_size,
        steps=STEPS,
        delta=1e-5,
        noise_multiplier=0.0 if engine is None else sigma,
        num_groups=1 if engine is None else len(engine.groups),
        quantile_budget=clip.quantile_budget if clip.policy == "adaptive" else 0.0,
        accountant="rdp",
    )
    noise = NoiseSource.from_seed(7)
    optimizer = make_optimizer(task.model.parameters(), optim)
    trainer = Trainer(
        task=task,
        private=PrivateStep(
            model=task.model,
            engine=engine,
            thresholds=None if engine is None else make_thresholds(clip, plan),
            plan=plan,
            noise=noise,
            allocation="global",
            optimizer=optimizer,
            device=torch.device("cpu"),
            sums=TaskSums(task, microbatch),
        ),
        schedule=make_schedule(optimizer, optim, STEPS),
    )
    trainer.private.sampler = PoissonSampler(EXAMPLES, plan.sample_rate, 3)
    return trainer


def after(trainer: Trainer) -> torch.Tensor:
    for step in range(STEPS):
        trainer.step(step)
    return torch.cat([p.detach().flatten() for p in trainer.task.model.parameters()])


@pytest.mark.parametrize(
    "clip", [NONE, FLAT, GHOST, FIXED_LAYER, ADAPTIVE_LAYER, ADAPTIVE_FLAT, ADAPTIVE_BLOCK], ids=lambda clip: clip.name
)
def test_the_physical_batch_changes_neither_update_nor_thresholds(clip):
    whole = make_trainer(clip, microbatch=64)
    expected = after(whole)
    for microbatch in (1, 4):
        part = make_trainer(clip, microbatch=microbatch)
        torch.testing.assert_close(after(part), expected, rtol=1e-9, atol=1e-12)
        if part.private.thresholds is not None:
            clips = (part.private.thresholds.clip_thresholds, whole.private.thresholds.clip_thresholds)
            torch.testing.assert_close(*clips, rtol=1e-12, atol=0)


@pytest.mark.parametrize("grouping", ["flat", "layer", "block"])
def test_infinite_thresholds_without_noise_are_plain_sgd(grouping):
    loose = ClipConfig("loose", grouping=grouping, policy="fixed", threshold=1e9, rescale=False)
    private = after(make_trainer(loose, sigma=0.0))
    torch.testing.assert_close(private, after(make_trainer(NONE)), rtol=1e-9, atol=1e-12)


def test_division_is_by_the_configured_batch_size():
    trainer = make_trainer(NONE, optim=OptimConfig(learning_rate=1.0))
    before = trainer.task.model[3].bias.detach().clone()
    drawn = trainer.private.sampler.indices(0)
    assert len(drawn) != BATCH
    gradient = torch.autograd.grad(trainer.task.losses_of(drawn).sum(), trainer.task.model[3].bias)[0]
    trainer.step(0)
    torch.testing.assert_close(before - trainer.task.model[3].bias.detach(), gradient / BATCH)


def test_an_empty_batch_is_a_step_of_noise_alone():
    trainer = make_trainer(ADAPTIVE_LAYER, batch_size=0.01)
    assert len(trainer.private.sampler.indices(0)) == 0
    before = torch.cat([p.detach().flatten() for p in trainer.task.model.parameters()])
    thresholds = trainer.private.thresholds.clip_thresholds
    report = trainer.report(trainer.step(0))
    moved = torch.cat([p.detach().flatten() for p in trainer.task.model.parameters()]) - before
    assert report["nonprivate/batch_size"] == 0 and bool((moved != 0).all())
    expected = (
        0.5 * trainer.private.plan.gradient_noise_multiplier * 0.5 * math.sqrt(len(moved)) / 0.01
    )  # rate · σ_new · S · √d / B
    assert float(moved.norm()) == pytest.approx(expected, rel=0.3)
    assert not torch.equal(trainer.private.thresholds._raw, thresholds)


def test_noise_uses_the_thresholds_that_clipped(monkeypatch):
    trainer, seen = make_trainer(ADAPTIVE_LAYER), []

    def spy(sensitivity, **settings):
        seen.append((sensitivity.thresholds.clone(), trainer.private.engine.thresholds.clone()))
        return release(sensitivity, **settings)

    release = a_step.release_gradients
    monkeypatch.setattr(a_step, "release_gradients", spy)
    after(trainer)
    for noised, clipped in seen:
        torch.testing.assert_close(noised, clipped.double(), rtol=1e-12, atol=0)
    assert not torch.equal(seen[0][0], seen[1][0])


def test_state_goes_back_and_forth():
    adam = OptimConfig(name="adam", learning_rate=0.01, schedule="cosine", warmup=0.4)
    whole = make_trainer(ADAPTIVE_LAYER, optim=adam)
    expected = after(whole)
    first, second = make_trainer(ADAPTIVE_LAYER, optim=adam), make_trainer(ADAPTIVE_LAYER, optim=adam)
    first.step(0)
    second.load_state_dict(first.state_dict())
    second.step(1)
    rates = second.report(second.step(2))["learning_rate"]
    assert torch.equal(torch.cat([p.detach().flatten() for p in second.task.model.parameters()]), expected)
    assert torch.equal(second.private.thresholds.clip_thresholds, whole.private.thresholds.clip_thresholds)
    assert rates == make_trainer_rate(adam, 2)


def make_trainer_rate(optim: OptimConfig, step: int) -> float:
    trainer = make_trainer(NONE, optim=optim)
    return [trainer.report(trainer.step(s))["learning_rate"] for s in range(step + 1)][-1]


def test_the_task_orders_a_batch_and_looks_at_each_update(monkeypatch):
    trainer, seen = make_trainer(FLAT), []
    checked: list[int] = []

    def read(examples, even=False):
        seen.extend(examples)
        return ToyTask.read(trainer.task, examples)

    monkeypatch.setattr(trainer.task, "order", lambda examples: -np.sort(-examples))
    monkeypatch.setattr(trainer.task, "read", read)
    monkeypatch.setattr(trainer.task, "check_update", checked.append)
    trainer.step(0)
    assert seen == sorted(trainer.private.sampler.indices(0), reverse=True) and checked == [0]
