"""Plays the one-run game with the real training code, in one process or a pipeline, and guesses the canaries."""

import copy
import math
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn

from groupwise.audit.attacker import Attacker, Evidence, log_ratio
from groupwise.audit.bounds import one_run_epsilon
from groupwise.audit.canaries import LOUD, Block, CanaryTask, Codes, Layers, Present
from groupwise.audit.options import Setting
from groupwise.build import build_trainer
from groupwise.config.schema import RunConfig
from groupwise.pipeline.split import Stage
from groupwise.privacy import PrivacyPlan
from groupwise.processes.environment import Place
from groupwise.processes.start import spawn
from groupwise.run import plan_run
from groupwise.training.from_config import make_engine
from groupwise.training.ranks import Ranks
from groupwise.training.step import Trainer
from groupwise.training.task import Task

_REHEARSALS = 12
_FRACTIONS = (0.01, 0.02, 0.03, 0.05, 0.08, 0.12, 0.2, 0.3, 0.5)


@lru_cache
def choose_guesses(power: float, sample_rate: float, steps: int, canaries: int, delta: float) -> tuple[int, int]:
    """Return the numbers of guesses (in, out) with the largest expected bound, by simulation with the claimed noise.

    ``power`` is a = Σ_k ‖own‖²/std_k² for one canary in one step.
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
            promised = one_run_epsilon(int(np.mean(right)), guesses, canaries, delta)
            best = max(best, (promised, (guesses - out, out)))
    return best[1]


def count_right(scores: NDArray[np.float64], present: NDArray[np.bool_], inside: int, out: int) -> int:
    """Count right guesses if the ``inside`` highest scores are guessed "in" and the ``out`` lowest ones "out"."""
    order = np.argsort(scores, kind="stable")
    return int(present[order[len(order) - inside :]].sum() + (~present[order[:out]]).sum())


def present_canaries(setting: Setting) -> np.ndarray:
    """Return the mask of canaries in the data, (m,) bool, each with probability ½."""
    return np.random.default_rng([setting.seed, 1]).integers(0, 2, setting.canaries).astype(bool)


def level_of(setting: Setting) -> float:
    """Return the largest initial threshold of a group."""
    clip = setting.config.clip
    if setting.model == "codes":
        return clip.initial_threshold or clip.threshold / math.sqrt(setting.canaries)
    return max(clip.threshold, clip.initial_threshold or 0.0)


def make_trainer(config: RunConfig, task: Task, present: np.ndarray, ranks: Ranks | None = None) -> Trainer:
    """Return a run's trainer on the examples that are `present`, (N,) bool. Each stage of a pipeline calls this."""
    ranks = ranks or Ranks()
    engine = make_engine(task.model, config.clip)
    assert engine is not None, "options refuses clip=none"
    plan = plan_run(config, task.train_size, sum(ranks.gather(len(engine.groups))))
    trainer = build_trainer(config, task, engine, plan, torch.device("cpu"), ranks, None)
    trainer.private.sampler = Present(trainer.private.sampler, present)
    return trainer


def audit_one_run(setting: Setting) -> tuple[PrivacyPlan, list[Evidence]]:
    """Play in one process, and return the plan and each step's evidence."""
    torch.manual_seed(setting.seed)
    m, level = setting.canaries, level_of(setting)
    model = Codes(m, level) if setting.model == "codes" else Layers(m, LOUD * level)
    return _play(setting, model, lambda model, who: model(who))


def _play(
    setting: Setting, model: nn.Module, losses_of: Callable[[nn.Module, Tensor], Tensor], ranks: Ranks | None = None
) -> tuple[PrivacyPlan, list[Evidence]]:
    """Train a model of canaries, or this process's stage of one, and return the plan and each step's evidence."""
    plain = copy.deepcopy(model)
    trainer = make_trainer(setting.config, CanaryTask(model, setting.canaries), present_canaries(setting), ranks)
    attacker = Attacker(trainer, plain, losses_of, setting)
    plan = trainer.private.plan
    return plan, [attacker.step(step) for step in range(plan.steps)]


class CanaryStage(Stage):
    """A block of canaries. The stage adds its part to the losses that it receives, and sends them on."""

    reads = ("labels",)

    def __init__(self, index: int, count: int, canaries: int, level: float) -> None:
        super().__init__(index, count)
        self.block = Block(canaries, LOUD * level * (index + 1))

    def hidden(self, x: Tensor, **kwargs: Any) -> Tensor:
        """Map indices (b, 1), or the previous stage's output (b, 2), to (b, 2): losses up to this stage, and zeros."""
        who = x[:, 0] if self.first else kwargs["labels"]
        part = self.block(who)
        so_far = part if self.first else x[:, 0] + part
        return torch.stack([so_far, torch.zeros_like(so_far)], 1)

    def losses(self, hidden: Tensor, kwargs: Mapping[str, Tensor]) -> Tensor:
        """Return the losses, (b,)."""
        return hidden[:, 0]

    def activation(self, b: int, T: int) -> tuple[int, ...]:
        """Return the shape of an activation, (b, 2)."""
        return b, 2


def audit_pipeline(setting: Setting) -> tuple[PrivacyPlan, list[Evidence]]:
    """Play with one process per stage, and return the plan and each step's evidence from all stages together."""
    found = spawn(setting.config, partial(_stage, setting=setting))
    return PrivacyPlan.from_dict(found["plan"]), found["evidence"]


def _stage(config: RunConfig, place: Place, setting: Setting) -> dict[str, Any]:
    """Run one stage's process. The main process returns the evidence of all stages."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=place.meeting, rank=place.rank, world_size=place.world)
    ranks = Ranks(config.pipeline.stages)
    torch.manual_seed(setting.seed)
    stage = CanaryStage(ranks.stage, ranks.stages, setting.canaries, level_of(setting))
    plan, own = _play(setting, stage, lambda model, who: model.block(who), ranks)  # type: ignore[operator]
    by_stage = ranks.gather(own)
    dist.destroy_process_group()
    together = [sum(parts[1:], parts[0]) for parts in zip(*by_stage, strict=True)]
    return {"plan": plan.to_dict(), "evidence": together}
