"""The audit of many runs: how well can two neighbouring data sets be told apart by what the real trainer releases?

A world is a data set with everything that runs on it. It is played again and again from the same start, each time with
fresh noise and fresh batches, and each time an attacker, who knows both data sets and all settings, turns what was
released into one score: the higher, the more it looks like the world that has the example. The scores of both worlds
bound ε from below (`groupwise.privacy.audit`). It takes thousands of plays, so the models are tiny.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from groupwise.privacy import AdaptiveThresholds, NoiseSource
from groupwise.privacy.audit import two_worlds_epsilon, two_worlds_gaussian_epsilon
from groupwise.training.loop import Trainer


@dataclass(frozen=True)
class Release:
    """What the attacker sees of one step.

    Args:
        update: by how much the weights fell, (P,) float64, parameters in the model's order; under SGD at rate 1 this is
            the released mean gradient.
        thresholds: C (K,) after the step.
    """

    update: Tensor
    thresholds: Tensor


Score = Callable[[Sequence[Release]], float]


class World(Protocol):
    """Something that can be played independently again and again."""

    def play(self) -> float:
        """The attacker's score of one more play."""


class TrainerWorld:
    """Plays of `steps` steps of real trainers, each from the same weights and thresholds.

    The n-th play takes the steps n·steps, n·steps + 1, … of the trainer, whose noise and batches are independent of all
    others: they are pure functions of the key and the step. A `ShuffleSampler` needs `steps` to be whole epochs.

    Args:
        trainers: one, or all replicas of one run; what is seen is the first's.
        steps: of one play.
        score: the attacker.
        together: runs a step of all trainers; by default one after the other.
    """

    def __init__(
        self,
        trainers: Sequence[Trainer],
        steps: int,
        score: Score,
        together: Callable[[int], object] | None = None,
    ) -> None:
        self._trainers, self._steps, self._score = trainers, steps, score
        self._together = together or self._one_by_one
        self._start = [p.detach().clone() for p in trainers[0].task.model.parameters()]
        policy = trainers[0].thresholds
        self._thresholds = None if policy is None else policy.state_dict()
        self._done = 0

    def play(self) -> float:
        """The score of `steps` more steps, from the start."""
        self._go_back()
        releases, before = [], self._weights()
        for step in range(self._done, self._done + self._steps):
            self._together(step)
            after, policy = self._weights(), self._trainers[0].thresholds
            releases.append(Release(before - after, torch.zeros(0) if policy is None else policy.clip_thresholds))
            before = after
        self._done += self._steps
        return self._score(releases)

    def _one_by_one(self, step: int) -> None:
        for trainer in self._trainers:
            trainer.step(step)

    def _weights(self) -> Tensor:
        parameters = self._trainers[0].task.model.parameters()
        return torch.cat([parameter.detach().flatten() for parameter in parameters]).double()

    def _go_back(self) -> None:
        for trainer in self._trainers:
            with torch.no_grad():
                for parameter, start in zip(trainer.task.model.parameters(), self._start, strict=True):
                    parameter.copy_(start)
            if trainer.thresholds is not None and self._thresholds is not None:
                trainer.thresholds.load_state_dict(self._thresholds)


class CountWorld:
    """Plays of one real `AdaptiveThresholds.update`: what do the thresholds tell of the vector of counts?

    Args:
        thresholds: a policy at its start.
        counts: how many examples are within each threshold, (K,).
        examples: how many examples there are.
        noise: a source of this world's own.
    """

    def __init__(self, thresholds: AdaptiveThresholds, counts: Tensor, examples: int, noise: NoiseSource) -> None:
        self._policy, self._counts, self._examples, self._noise = thresholds, counts, examples, noise
        self._start, self._done = thresholds.state_dict(), 0

    def play(self) -> float:
        """-Σ_k log C_k after one update: rises with the released counts, all K together."""
        self._policy.load_state_dict(self._start)
        self._policy.update(self._counts, self._examples, self._noise, self._done)
        self._done += 1
        return -float(self._policy.clip_thresholds.log().sum())


@dataclass(frozen=True)
class Distinguished:
    """How far two worlds could be told apart.

    Args:
        plays: of each world.
        epsilon: ε is at least this, with confidence, whatever the mechanism.
        gaussian_epsilon: the same if the trade-off between the two errors is that of a Gaussian mechanism.
    """

    plays: int
    epsilon: float
    gaussian_epsilon: float


def distinguish(without: World, having: World, plays: int, delta: float, confidence: float = 0.95) -> Distinguished:
    """Play both worlds `plays` times and bound ε at `delta` from below.

    Formal guarantee: if what one play of a world releases is (ε, `delta`)-DP under adding or removing the example in
    which the worlds differ, and plays are independent, then `epsilon` is above ε with probability at most
    1 - `confidence`. Scores that are not finite count as 0, the attacker's "no idea".
    """
    out, inside = (_scores(world, plays) for world in (without, having))
    return Distinguished(
        plays,
        two_worlds_epsilon(out, inside, delta, confidence),
        two_worlds_gaussian_epsilon(out, inside, delta, confidence),
    )


def _scores(world: World, plays: int) -> np.ndarray:
    played = [world.play() for _ in range(plays)]
    return np.array([score if math.isfinite(score) else 0.0 for score in played])
