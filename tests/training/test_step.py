"""A step releases one noised sum for each logical batch, for any microbatch size and any norm method."""

import numpy as np
import pytest
import torch
from torch import nn

from groupwise.config.schema import ClipConfig, OptimConfig
from groupwise.privacy import PoissonSampler
from groupwise.training import private_step
from groupwise.training.step import Trainer
from tests.tiny_training import (
    ADAPTIVE_BLOCK,
    ADAPTIVE_FLAT,
    ADAPTIVE_LAYER,
    FIXED_LAYER,
    FLAT,
    GHOST,
    NONE,
    Points,
    trainer_of,
)

EXAMPLES, BATCH, STEPS = 96, 32, 3


class ToyTask(Points):
    """Classification of random points by a small float64 network."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, 3)), EXAMPLES)

    def read(self, examples, even=False):
        return dict(zip("xy", super().read(examples), strict=True))

    def losses(self, model, batch):
        return super().losses(model, (batch["x"], batch["y"]))


def make_trainer(
    clip: ClipConfig,
    microbatch: int = 64,
    sigma: float = 1.0,
    batch_size: float = BATCH,
    optim: OptimConfig | None = None,
) -> Trainer:
    optim = optim or OptimConfig(learning_rate=0.5)
    trainer = trainer_of(ToyTask(), clip, optim, batch_size=batch_size, steps=STEPS, sigma=sigma, microbatch=microbatch)
    trainer.private.sampler = PoissonSampler(EXAMPLES, trainer.private.plan.sample_rate, 3)
    return trainer


def after(trainer: Trainer) -> torch.Tensor:
    for step in range(STEPS):
        trainer.step(step)
    return torch.cat([p.detach().flatten() for p in trainer.task.model.parameters()])


@pytest.mark.parametrize(
    "clip", [NONE, FLAT, GHOST, FIXED_LAYER, ADAPTIVE_LAYER, ADAPTIVE_FLAT, ADAPTIVE_BLOCK], ids=lambda clip: clip.name
)
def test_the_microbatch_size_changes_neither_update_nor_thresholds(clip):
    single = make_trainer(clip, microbatch=64)
    expected = after(single)
    for microbatch in (1, 4):
        part = make_trainer(clip, microbatch=microbatch)
        torch.testing.assert_close(after(part), expected, rtol=1e-9, atol=1e-12)
        if part.private.thresholds is not None:
            clips = (part.private.thresholds.clip_thresholds, single.private.thresholds.clip_thresholds)
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


def test_noise_uses_the_thresholds_that_clipped(monkeypatch):
    trainer, seen = make_trainer(ADAPTIVE_LAYER), []

    def spy(sensitivity, **settings):
        seen.append((sensitivity.thresholds.clone(), trainer.private.engine.thresholds.clone()))
        return release(sensitivity, **settings)

    release = private_step.release_gradients
    monkeypatch.setattr(private_step, "release_gradients", spy)
    after(trainer)
    for noised, clipped in seen:
        torch.testing.assert_close(noised, clipped.double(), rtol=1e-12, atol=0)
    assert not torch.equal(seen[0][0], seen[1][0])


def test_a_trainer_resumes_from_its_state():
    adam = OptimConfig(name="adam", learning_rate=0.01, schedule="cosine", warmup=0.4)
    reference = make_trainer(ADAPTIVE_LAYER, optim=adam)
    expected = after(reference)
    first, second = make_trainer(ADAPTIVE_LAYER, optim=adam), make_trainer(ADAPTIVE_LAYER, optim=adam)
    first.step(0)
    second.load_state_dict(first.state_dict())
    second.step(1)
    rates = second.report(second.step(2))["learning_rate"]
    assert torch.equal(torch.cat([p.detach().flatten() for p in second.task.model.parameters()]), expected)
    assert torch.equal(second.private.thresholds.clip_thresholds, reference.private.thresholds.clip_thresholds)
    assert rates == learning_rate_after(adam, 2)


def learning_rate_after(optim: OptimConfig, step: int) -> float:
    trainer = make_trainer(NONE, optim=optim)
    return [trainer.report(trainer.step(s))["learning_rate"] for s in range(step + 1)][-1]


def test_the_task_orders_a_batch(monkeypatch):
    trainer, seen = make_trainer(FLAT), []

    def read(examples, even=False):
        seen.extend(examples)
        return ToyTask.read(trainer.task, examples)

    monkeypatch.setattr(trainer.task, "order", lambda examples: -np.sort(-examples))
    monkeypatch.setattr(trainer.task, "read", read)
    trainer.step(0)
    assert seen == sorted(trainer.private.sampler.indices(0), reverse=True)
