"""Audits one mode by the game that its design names, and holds what came out."""

import time
from dataclasses import dataclass

import numpy as np

from groupwise.audit.attacker import log_ratio, power_if_clipped
from groupwise.audit.bounds import one_run_epsilon, one_run_gaussian_epsilon
from groupwise.audit.one_run import choose_guesses, count_right, play_alone, present_canaries
from groupwise.audit.one_run_pipeline import play_staged
from groupwise.audit.options import DESIGNS, Setting
from groupwise.audit.two_worlds import play_worlds
from groupwise.privacy import PrivacyPlan


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
        plan, told, share = play_worlds(setting)
        bounds = (told.epsilon, told.gaussian_epsilon)
        return Finding(setting, plan, 2 * told.plays, None, *bounds, time.monotonic() - began, share)
    if setting.config.pipeline.stages > 1:
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
