"""Worst cases of neighbouring data sets, and the two worlds in which the real trainer trains on them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from groupwise.audit.canaries import CanaryTask
from groupwise.audit.two_worlds import Score, TrainerWorld, World
from groupwise.build import build_trainer
from groupwise.config.schema import ClipConfig, DebugConfig, OptimConfig, RunConfig, TrainConfig
from groupwise.privacy import AdaptiveThresholds, NoiseSource, PoissonSampler, PrivacyPlan, make_plan
from groupwise.training.from_config import make_engine
from groupwise.training.ranks import Ranks
from groupwise.training.step import Trainer


class Linears(nn.Module):
    """A loss that is linear in the weights: Σ_k Σ_u ⟨w_k, x_ku⟩, whose gradient in layer k is Σ_u x_ku for every w.

    Args:
        layers: K. uses: U, the number of calls of each layer, which share its weight. width: entries of w_k.
        dropout: the rate at which entries of x are dropped out.
    """

    def __init__(self, layers: int, uses: int, width: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.layers = nn.ModuleList(nn.Linear(width, 1, bias=False) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        """(B, K, U, width) -> losses (B,)."""
        x = self.dropout(x)
        values = [layer(x[:, k, u]) for k, layer in enumerate(self.layers) for u in range(x.shape[2])]
        return torch.cat(values, 1).sum(1)


class Given(CanaryTask):
    """Examples that are gradients: x (N, K, U, width). With dropout their order is reversed."""

    def __init__(self, x: Tensor, dropout: float = 0.0) -> None:
        _, layers, uses, width = x.shape
        super().__init__(Linears(layers, uses, width, dropout).to(x.dtype), len(x))
        self.x, self._turned = x, dropout > 0

    def order(self, examples: np.ndarray) -> np.ndarray:
        """The examples in their order, or reversed."""
        return examples[::-1].copy() if self._turned else examples

    def read(self, examples: Sequence[int] | np.ndarray, even: bool = False) -> Tensor:
        """The gradients of these examples, (n, K, U, width)."""
        return self.x[np.asarray(examples)]


class CountWorld:
    """Plays one real `AdaptiveThresholds.update`, to test what the thresholds reveal about the counts.

    Args:
        thresholds: a policy in its initial state.
        counts: the number of examples within each threshold, (K,).
        examples: the number of examples.
        noise: a noise source for this world alone.
    """

    def __init__(self, thresholds: AdaptiveThresholds, counts: Tensor, examples: int, noise: NoiseSource) -> None:
        self._policy, self._counts, self._examples, self._noise = thresholds, counts, examples, noise
        self._start, self._done = thresholds.state_dict(), 0

    def __call__(self) -> float:
        """-Σ_k log C_k after one update, which grows with the sum of the released counts."""
        self._policy.load_state_dict(self._start)
        self._policy.update(self._counts, self._examples, self._noise, self._done)
        self._done += 1
        return -float(self._policy.clip_thresholds.log().sum())


class HandedIn(Exception):
    """Ends a replica's step after it has handed in its tensors for a sum."""


class SequentialRanks(Ranks):
    """Replaces `groupwise.training.ranks.Ranks` in a step, for replicas that run one after another.

    Args:
        replica: d. hands: the tensors that each of the D replicas has handed in.
    """

    def __init__(self, replica: int, hands: list[list[Tensor]]) -> None:
        super().__init__()
        self.replica, self.replicas, self._hands = replica, len(hands), hands

    def sum_(self, tensors: Sequence[Tensor]) -> None:
        """On the first replica, sum over all replicas in place; on the others, hand in the tensors and end the step."""
        self._hands[self.replica] = [tensor.clone() for tensor in tensors]
        if self.replica:
            raise HandedIn
        for tensor, *of_all in zip(tensors, *self._hands, strict=True):
            tensor.copy_(torch.stack(of_all).sum(0))


class SequentialReplicas:
    """Runs replicas with equal weights through a step; only the weights of the first are updated.

    So a play must have one step, or gradients that do not depend on the weights.
    """

    def __init__(self, trainers: Sequence[Trainer]) -> None:
        hands: list[list[Tensor]] = [[] for _ in trainers]
        for replica, trainer in enumerate(trainers):
            trainer.private.ranks = SequentialRanks(replica, hands)
        self._first, *self._others = trainers

    def __call__(self, step: int) -> None:
        for trainer in self._others:
            try:
                trainer.step(step)
            except HandedIn:
                trainer.private.executed = step + 1
                continue
            raise AssertionError("a replica took a step without a sum over all of them")
        self._first.step(step)


Worlds = tuple[World, World]


class NoExamples:
    """A sampler that draws no examples."""

    def indices(self, step: int) -> np.ndarray:
        """No examples."""
        return np.empty(0, dtype=np.int64)


@dataclass(frozen=True)
class Worst:
    """A worst case for the complete trainer.

    Args:
        others: gradients of the examples of both worlds, (n, K, U, width).
        canary: gradients of the example in which the worlds differ, (K, U, width); it comes last.
        clip: the clipping mode, with thresholds of 1.
        score: plan -> the score of the attacker.
        steps: steps of one play. rate: the sampling rate ρ. replicas: R.
        microbatch: examples of a microbatch. dropout: the rate for entries of the gradients.
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
        """The claimed plan; N is public and includes the canary."""
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
        score = self.score(plan)
        trainers = [self._trainer(plan, seed, canary) for _ in range(self.replicas)]
        together = SequentialReplicas(trainers) if self.replicas > 1 else None
        return TrainerWorld(trainers, self.steps, score, together)

    def _trainer(self, plan: PrivacyPlan, seed: int, canary: bool) -> Trainer:
        config = RunConfig(
            clip=self.clip,
            optim=OptimConfig(learning_rate=1.0),
            train=TrainConfig(microbatch=self.microbatch),
            debug=DebugConfig(noise_seed=seed),
        )
        torch.manual_seed(0)
        gradients = torch.cat([self.others, self.canary.unsqueeze(0)])
        if len(gradients) == 1:  # the trace needs two examples; the second is never drawn
            gradients = gradients.repeat(2, 1, 1, 1)
        task = Given(gradients, self.dropout)
        engine = make_engine(task.model, self.clip)
        trainer = build_trainer(config, task, engine, plan, torch.device("cpu"), Ranks(), None)
        size = len(self.others) + canary
        key = trainer.private.noise.derive("sampling")
        trainer.private.sampler = PoissonSampler(size, plan.sample_rate, key) if size else NoExamples()  # type: ignore[assignment]
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
        """The plan of one full batch."""
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
