"""Distinguishes two neighbouring datasets by the releases of many runs of the real trainer."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from groupwise.audit import two_worlds_epsilon
from groupwise.audit.attacker import stds_of
from groupwise.audit.canaries import Present
from groupwise.audit.one_run import make_trainer
from groupwise.audit.options import DESIGNS, Setting, set_rate
from groupwise.config.schema import DebugConfig
from groupwise.errors import UserError
from groupwise.privacy import PrivacyPlan
from groupwise.tasks import make_task
from groupwise.training.step import Trainer


@dataclass(frozen=True)
class Release:
    """What the attacker sees of one step.

    Args:
        update: weights before minus weights after the step, (P,) float64, in the order of the model's parameters. With
            SGD at learning rate 1 this is the released mean gradient.
        thresholds: C (K,) after the step.
    """

    update: Tensor
    thresholds: Tensor


Score = Callable[[Sequence[Release]], float]
MASKS = 32
"""The number of masks that the attacker averages over, since the run's masks are secret."""


World = Callable[[], float]
"""Plays once more, independently of other plays, and returns the attacker's score."""


class TrainerWorld:
    """Plays `steps` steps of real trainers, each time from the same weights and thresholds.

    The n-th play takes the steps n·steps, n·steps + 1, … of the trainer. Noise and batches are pure functions of the
    key and the step, so plays are independent. With a `ShuffleSampler`, `steps` must be whole epochs.

    Args:
        trainers: one trainer, or all replicas of one run. The first one is observed.
        together: runs a step of all trainers; not needed for one trainer.
    """

    def __init__(
        self, trainers: Sequence[Trainer], steps: int, score: Score, together: Callable[[int], object] | None = None
    ) -> None:
        self._trainers, self._steps, self._score = trainers, steps, score
        self._together = together or trainers[0].step
        self._start = [p.detach().clone() for p in trainers[0].task.model.parameters()]
        policy = trainers[0].private.thresholds
        self._thresholds = None if policy is None else policy.state_dict()
        self._done = 0

    def __call__(self) -> float:
        """Go back to the start, run `steps` more steps, and return their score."""
        self._go_back()
        releases, before = [], self._weights()
        for step in range(self._done, self._done + self._steps):
            self._together(step)
            after, policy = self._weights(), self._trainers[0].private.thresholds
            releases.append(Release(before - after, torch.zeros(0) if policy is None else policy.clip_thresholds))
            before = after
        self._done += self._steps
        return self._score(releases)

    def _weights(self) -> Tensor:
        parameters = self._trainers[0].task.model.parameters()
        return torch.cat([parameter.detach().flatten() for parameter in parameters]).double()

    def _go_back(self) -> None:
        for trainer in self._trainers:
            with torch.no_grad():
                for parameter, start in zip(trainer.task.model.parameters(), self._start, strict=True):
                    parameter.copy_(start)
            if trainer.private.thresholds is not None and self._thresholds is not None:
                trainer.private.thresholds.load_state_dict(self._thresholds)


def distinguish(without: World, having: World, plays: int, delta: float) -> float:
    """Play both worlds `plays` times and bound ε at `delta` from below.

    Formal guarantee: let the releases of one play be (ε, `delta`)-DP for adding or removing the example in which the
    worlds differ, and let plays be independent. Then the result is above ε with probability at most 1 - `CONFIDENCE`,
    for any mechanism. Scores that are not finite count as 0.
    """
    played = np.array([[world() for _ in range(plays)] for world in (without, having)])
    out, inside = np.nan_to_num(played, posinf=0.0, neginf=0.0)
    return two_worlds_epsilon(out, inside, delta)


def audit_two_worlds(setting: Setting) -> tuple[PrivacyPlan, float, float]:
    """Return the plan, the bound on ε, and `Finding.share`.

    Raises:
        UserError: as `make_task` and `build_trainer`, or a task with fewer than two examples.
    """
    trainer, other = (trainer_of(setting, 2 * setting.seed + world) for world in (0, 1))
    stds = _by_entry(trainer)
    # The example with the largest contribution, in stds of the noise, for one draw of masks.
    lengths = [float((_clipped_gradient(trainer, i) / stds).norm()) for i in range(trainer.task.train_size)]
    canary = int(np.argmax(lengths))
    own = _mean_gradient(trainer, canary)
    direction = own / stds.square()
    trainer.private.sampler = Present(trainer.private.sampler, np.arange(trainer.task.train_size) != canary)
    without, having = (
        TrainerWorld([made], 1, lambda seen: float(seen[0].update @ direction)) for made in (trainer, other)
    )
    plan = trainer.private.plan
    found = distinguish(without, having, setting.plays, plan.delta)
    share = float((own / stds).norm()) * plan.gradient_noise_multiplier
    return plan, found, share


def trainer_of(setting: Setting, noise_seed: int) -> Trainer:
    """Return a trainer on all examples. Both worlds start from the same weights, with their own noise and masks."""
    config = replace(setting.config, debug=DebugConfig(noise_seed=noise_seed))
    task = make_task(config, torch.device("cpu"))
    if task.train_size < 2:
        raise UserError("An audit needs at least two examples: give data.train_limit=2 or more.")
    set_rate(config, DESIGNS[setting.design].sample_rate * task.train_size)
    return make_trainer(config, task, np.ones(task.train_size, dtype=bool))


def _mean_gradient(trainer: Trainer, canary: int) -> Tensor:
    """Return an example's clipped gradient (P,), averaged over masks that the attacker draws."""
    return torch.stack([_clipped_gradient(trainer, canary) for _ in range(MASKS)]).mean(0)


def _clipped_gradient(trainer: Trainer, example: int) -> Tensor:
    """Return an example's clipped gradient, (P,) float64, as in `Release`; masks come from the default generator."""
    engine, thresholds = trainer.private.engine, trainer.private.thresholds
    assert engine is not None and thresholds is not None
    engine.set_thresholds(thresholds.clip_thresholds, thresholds.count_thresholds)
    trainer.private.clear()
    engine.clip(trainer.task.losses_of, [example])
    found = [torch.zeros_like(p) if p.grad is None else p.grad for p in trainer.task.model.parameters()]
    return torch.cat([own.flatten() for own in found]).double()


def _by_entry(trainer: Trainer) -> Tensor:
    """Return the standard deviation of the noise on each entry of the sum, (P,); infinite if it is not released."""
    engine = trainer.private.engine
    assert engine is not None
    stds = {id(p): std for group, std in zip(engine.groups, stds_of(trainer), strict=True) for p in group.parameters}
    parameters = trainer.task.model.parameters()
    return torch.cat([torch.full((p.numel(),), stds.get(id(p), float("inf")), dtype=torch.float64) for p in parameters])
