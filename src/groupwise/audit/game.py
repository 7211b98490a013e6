"""The one-run game, through the very code that trains: make_engine, plan_run, make_trainer, Trainer.step."""

import copy
import math
import time
from dataclasses import dataclass

import numpy as np
import torch

from groupwise.audit.canaries import make_canaries
from groupwise.audit.evidence import Evidence, log_ratio
from groupwise.audit.guessing import choose_guesses, count_right
from groupwise.audit.options import DESIGNS, Setting
from groupwise.audit.task import CanaryTask, Present
from groupwise.audit.watch import Watcher, power_if_clipped
from groupwise.errors import UserError
from groupwise.launch.making import make_trainer
from groupwise.launch.run import plan_run
from groupwise.privacy import PrivacyPlan
from groupwise.privacy.audit.bounds import one_run_epsilon, one_run_gaussian_epsilon
from groupwise.training.clipping import make_engine
from groupwise.training.ranks import Alone


@dataclass(frozen=True)
class Finding:
    """What came out.

    Args:
        guesses, correct: of one run; of two worlds all plays, and None.
        bound: the ε that the guesses refute, at ``Setting.confidence``.
        gaussian: the same for a mechanism that is known to be one Gaussian release (a full batch, once), else None.
    """

    setting: Setting
    plan: PrivacyPlan
    guesses: int
    correct: int | None
    bound: float
    gaussian: float | None
    seconds: float
    share: float | None = None
    """Of two worlds: how long the example's mean gradient is, in what one example may add."""

    @property
    def claimed(self) -> float:
        """ε of the plan."""
        return self.plan.epsilon

    @property
    def kept(self) -> bool:
        """Whether no bound exceeds the claim."""
        return max(self.bound, self.gaussian or 0.0) <= self.claimed


def play(setting: Setting) -> Finding:
    """Audit one mode.

    Raises:
        UserError: what cannot be audited.
    """
    began = time.monotonic()
    if DESIGNS[setting.design].real:
        from groupwise.audit.real import play_worlds

        plan, told, share = play_worlds(setting)
        bounds = (told.epsilon, told.gaussian_epsilon)
        return Finding(setting, plan, 2 * told.plays, None, *bounds, time.monotonic() - began, share)
    if setting.config.pipeline.stages > 1:
        from groupwise.audit.staged import play_staged

        plan, evidence = play_staged(setting)
    else:
        plan, evidence = play_alone(setting)
    scores = np.sum([log_ratio(of_step, plan.sample_rate) for of_step in evidence], axis=0)
    power = power_if_clipped(plan, codes=setting.model == "codes")
    inside, out = choose_guesses(power, plan.sample_rate, plan.steps, setting.canaries, plan.delta, setting.confidence)
    guesses, correct = inside + out, count_right(scores, present_canaries(setting), inside, out)
    asked = (correct, guesses, setting.canaries, plan.delta, setting.confidence)
    one_release = plan.sample_rate == 1.0
    return Finding(
        setting,
        plan,
        guesses,
        correct,
        one_run_epsilon(*asked),
        one_run_gaussian_epsilon(*asked) if one_release else None,
        time.monotonic() - began,
    )


def present_canaries(setting: Setting) -> np.ndarray:
    """Which canaries are in the data, (m,) bool: a fair coin each."""
    return np.random.default_rng([setting.seed, 1]).integers(0, 2, setting.canaries).astype(bool)


def level_of(setting: Setting) -> float:
    """The largest threshold that a group may begin with; for codes, the very one."""
    clip = setting.config.clip
    if setting.model == "codes":
        return clip.initial_threshold or clip.threshold / math.sqrt(setting.canaries)
    return max(clip.threshold, clip.initial_threshold or 0.0)


def follow(setting: Setting, watcher: Watcher, plan: PrivacyPlan) -> list[Evidence]:
    """All steps' evidence."""
    return [watcher.step(step) for step in range(plan.steps)]


def play_alone(setting: Setting) -> tuple[PrivacyPlan, list[Evidence]]:
    """One process: the plan, and each step's evidence."""
    config, m = setting.config, setting.canaries
    model = make_canaries(setting.model, m, level_of(setting), setting.seed, setting.dropout)
    plain = copy.deepcopy(model)
    engine = make_engine(model, config.clip)
    if engine is None:
        raise UserError("clip=none claims nothing, so there is nothing to audit: choose a clipping mode.")
    plan = plan_run(config, m, len(engine.groups))
    trainer = make_trainer(config, CanaryTask(model, m), engine, plan, torch.device("cpu"), Alone(), None)
    trainer.sampler = Present(trainer.sampler, present_canaries(setting))  # type: ignore[assignment]
    try:
        return plan, follow(setting, Watcher(trainer, plain, lambda model, who: model(who), setting), plan)
    finally:
        engine.detach()
