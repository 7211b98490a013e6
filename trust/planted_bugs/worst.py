"""Neighbouring data sets as bad as they get, and the two worlds that the real trainer makes of them."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from groupwise.audit.two_worlds import CountWorld, Score, TrainerWorld, World
from groupwise.build import build_trainer
from groupwise.config.schema import ClipConfig, DebugConfig, OptimConfig, RunConfig, TrainConfig
from groupwise.privacy import AdaptiveThresholds, NoiseSource, PoissonSampler, PrivacyPlan, make_plan
from groupwise.training.from_config import make_engine
from groupwise.training.ranks import Alone
from groupwise.training.step import Trainer
from trust.planted_bugs.linears import Given
from trust.planted_bugs.replicas import Together

Worlds = tuple[World, World]


class Nobody:
    """Draws from no examples at all."""

    def indices(self, step: int) -> np.ndarray:
        """None."""
        return np.empty(0, dtype=np.int64)


@dataclass(frozen=True)
class Worst:
    """One worst case for the whole trainer.

    Args:
        others: gradients of the examples of both worlds, (n, K, U, width).
        canary: those of the one in which they differ, (K, U, width); it comes last.
        clip: the mode; thresholds are 1 where the case is.
        score: of a plan, the attacker.
        steps: of one play. rate: ρ. replicas: R. microbatch: examples at once. dropout: of entries of the gradients.
    """

    others: Tensor
    canary: Tensor
    clip: ClipConfig
    score: Callable[[PrivacyPlan], Score]
    steps: int = 1
    rate: float = 1.0
    replicas: int = 1
    microbatch: int = 64
    dropout: float = 0.0

    def worlds(self, epsilon: float, delta: float, seed: int) -> Worlds:
        """The world without the canary and the one with it, under one plan, with independent noise."""
        return self._world(epsilon, delta, 2 * seed, False), self._world(epsilon, delta, 2 * seed + 1, True)

    def plan(self, epsilon: float, delta: float) -> PrivacyPlan:
        """What is claimed: N, the canary included, is public."""
        examples = len(self.others) + 1
        adaptive = self.clip.policy == "adaptive"
        return make_plan(
            dataset_size=examples,
            expected_batch_size=self.rate * examples,
            steps=self.steps,
            delta=delta,
            epsilon=epsilon,
            num_groups=1 if self.clip.grouping == "flat" else len(self.canary),
            quantile_budget=self.clip.quantile_budget if adaptive else 0.0,
            accountant="pld",
        )

    def _world(self, epsilon: float, delta: float, seed: int, canary: bool) -> TrainerWorld:
        plan = self.plan(epsilon, delta)
        trainers = [self._trainer(plan, seed, canary) for _ in range(self.replicas)]
        together = Together(trainers) if self.replicas > 1 else None
        return TrainerWorld(trainers, self.steps, self.score(plan), together)

    def _trainer(self, plan: PrivacyPlan, seed: int, canary: bool) -> Trainer:
        config = RunConfig(
            clip=self.clip,
            optim=OptimConfig(learning_rate=1.0),
            train=TrainConfig(microbatch=self.microbatch),
            debug=DebugConfig(noise_seed=seed),
        )
        torch.manual_seed(0)
        task = Given(torch.cat([self.others, self.canary.unsqueeze(0)]), self.dropout)
        engine = make_engine(task.model, self.clip)
        trainer = build_trainer(config, task, engine, plan, torch.device("cpu"), Alone(), None)
        size = len(self.others) + canary
        key = trainer.noise.derive("sampling")
        trainer.mechanism.sampler = PoissonSampler(size, plan.sample_rate, key) if size else Nobody()  # type: ignore[assignment]
        return trainer


@dataclass(frozen=True)
class WorstCounts:
    """A worst case for the vector of counts alone: the canary is within all thresholds.

    Args:
        groups: K. others: how many examples are in both worlds, all within the thresholds. budget: r.
    """

    groups: int
    others: int
    budget: float

    def worlds(self, epsilon: float, delta: float, seed: int) -> Worlds:
        """The world without the canary and the one with it."""
        plan = self.plan(epsilon, delta)
        return self._world(plan, 2 * seed, self.others), self._world(plan, 2 * seed + 1, self.others + 1)

    def plan(self, epsilon: float, delta: float) -> PrivacyPlan:
        """One full batch."""
        examples = self.others + 1
        return make_plan(
            dataset_size=examples,
            expected_batch_size=examples,
            steps=1,
            delta=delta,
            epsilon=epsilon,
            num_groups=self.groups,
            quantile_budget=self.budget,
            accountant="pld",
        )

    def _world(self, plan: PrivacyPlan, seed: int, examples: int) -> CountWorld:
        policy = AdaptiveThresholds(
            [1.0] * self.groups, 0.5, 1.0, plan.count_noise_multiplier, plan.expected_batch_size
        )
        counts = torch.full((self.groups,), examples)
        return CountWorld(policy, counts, examples, NoiseSource.from_seed(seed))
