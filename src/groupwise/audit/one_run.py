"""Plays the one-run game through the very code that trains, and guesses which canaries were in the data."""

import copy
import math
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray

from groupwise.audit.attacker import Attacker, Evidence, log_ratio
from groupwise.audit.bounds import one_run_epsilon
from groupwise.audit.canaries import CanaryTask, Present, make_canaries
from groupwise.audit.options import Setting
from groupwise.build import build_trainer
from groupwise.errors import UserError
from groupwise.privacy import PrivacyPlan
from groupwise.run import plan_run
from groupwise.training.from_config import make_engine
from groupwise.training.ranks import Alone

_REHEARSALS = 12
_FRACTIONS = (0.01, 0.02, 0.03, 0.05, 0.08, 0.12, 0.2, 0.3, 0.5)


@lru_cache
def choose_guesses(
    power: float, sample_rate: float, steps: int, canaries: int, delta: float, confidence: float
) -> tuple[int, int]:
    """(guesses of "in", guesses of "out") that promise the largest bound, by rehearsal with the noise as claimed.

    Args:
        power: a = Σ_k ‖own‖²/std_k² of one canary in one step; the other arguments are the plan's.
    """
    random = np.random.default_rng(0)
    rehearsed = []
    for _ in range(_REHEARSALS):
        present = random.integers(0, 2, canaries).astype(bool)
        scores = np.zeros(canaries)
        for _ in range(steps):
            drawn = present & (random.random(canaries) < sample_rate)
            found = drawn * power + np.sqrt(power) * random.standard_normal(canaries)
            scores += log_ratio(Evidence(found, np.full(canaries, power)), sample_rate)
        rehearsed.append((scores, present))
    best = (-1.0, (1, 1))
    for fraction in _FRACTIONS:
        for share_out in (0.5, 0.0):
            guesses = max(4, round(fraction * canaries))
            out = round(share_out * guesses)
            right = [count_right(scores, present, guesses - out, out) for scores, present in rehearsed]
            promised = one_run_epsilon(int(np.mean(right)), guesses, canaries, delta, confidence)
            best = max(best, (promised, (guesses - out, out)))
    return best[1]


def count_right(scores: NDArray[np.float64], present: NDArray[np.bool_], inside: int, out: int) -> int:
    """How many are right if the ``inside`` highest scores are called in, and the ``out`` lowest out."""
    order = np.argsort(scores, kind="stable")
    return int(present[order[len(order) - inside :]].sum() + (~present[order[:out]]).sum())


def present_canaries(setting: Setting) -> np.ndarray:
    """Which canaries are in the data, (m,) bool: a fair coin each."""
    return np.random.default_rng([setting.seed, 1]).integers(0, 2, setting.canaries).astype(bool)


def level_of(setting: Setting) -> float:
    """The largest threshold that a group may begin with; for codes, the very one."""
    clip = setting.config.clip
    if setting.model == "codes":
        return clip.initial_threshold or clip.threshold / math.sqrt(setting.canaries)
    return max(clip.threshold, clip.initial_threshold or 0.0)


def follow(setting: Setting, attacker: Attacker, plan: PrivacyPlan) -> list[Evidence]:
    """All steps' evidence."""
    return [attacker.step(step) for step in range(plan.steps)]


def audit_one_run(setting: Setting) -> tuple[PrivacyPlan, list[Evidence]]:
    """One process: the plan, and each step's evidence."""
    config, m = setting.config, setting.canaries
    model = make_canaries(setting.model, m, level_of(setting), setting.seed, setting.dropout)
    plain = copy.deepcopy(model)
    engine = make_engine(model, config.clip)
    if engine is None:
        raise UserError("clip=none claims nothing, so there is nothing to audit: choose a clipping mode.")
    plan = plan_run(config, m, len(engine.groups))
    trainer = build_trainer(config, CanaryTask(model, m), engine, plan, torch.device("cpu"), Alone(), None)
    trainer.mechanism.sampler = Present(trainer.mechanism.sampler, present_canaries(setting))
    try:
        return plan, follow(setting, Attacker(trainer, plain, lambda model, who: model(who), setting), plan)
    finally:
        engine.detach()
