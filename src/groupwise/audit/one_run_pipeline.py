"""Plays the one-run game on a pipeline of real processes, each stage a group of its own (per-device clipping)."""

import copy
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from groupwise.audit.attacker import Attacker, Evidence
from groupwise.audit.canaries import LOUD, CanaryTask, Picked, Present
from groupwise.audit.one_run import follow, level_of, present_canaries
from groupwise.audit.options import Setting
from groupwise.build import build_pipeline_trainer
from groupwise.config.schema import RunConfig
from groupwise.pipeline.split import Stage
from groupwise.privacy import PrivacyPlan
from groupwise.processes.environment import Place
from groupwise.processes.start import spawn
from groupwise.run import plan_run
from groupwise.training.from_config import make_engine
from groupwise.training.ranks import Ranks

WIDTH = 2


class CanaryStage(Stage):
    """Two layers of rows of canaries; what a stage sends on is what it got and its own part of the losses."""

    reads = ("labels",)

    def __init__(self, index: int, count: int, canaries: int, level: float, dropout: float) -> None:
        super().__init__(index, count)
        self.level = LOUD * level * (index + 1)
        self.rows = nn.Embedding(canaries, WIDTH)
        self.dropout = nn.Dropout(dropout)
        self.picked = Picked(canaries, 3, dropout=dropout)

    def own(self, who: Tensor) -> Tensor:
        """This stage's part of the losses, (b,)."""
        return self.level * (self.dropout(self.rows(who)).sum(1) + 0.5 * self.picked(who))

    def hidden(self, x: Tensor, **kwargs: Any) -> Tensor:
        """(b, 1) numbers of canaries, or (b, 2) of the stage before → (b, 2): all parts up to here, and zeros."""
        who = x[:, 0] if self.first else kwargs["labels"]
        part = self.own(who)
        so_far = part if self.first else x[:, 0] + part
        return torch.stack([so_far, torch.zeros_like(so_far)], 1)

    def losses(self, hidden: Tensor, kwargs: Mapping[str, Tensor]) -> Tensor:
        """(b,)."""
        return hidden[:, 0]

    def activation(self, b: int, T: int, *, before: bool = False) -> tuple[int, ...]:
        """(b, 2)."""
        return b, WIDTH


def audit_pipeline(setting: Setting) -> tuple[PrivacyPlan, list[Evidence]]:
    """Processes for all stages: the plan, and each step's evidence from all of them together."""
    found = spawn(setting.config, partial(_stage, setting=setting))
    return PrivacyPlan.from_dict(found["plan"]), found["evidence"]


def _stage(config: RunConfig, place: Place, setting: Setting) -> dict[str, Any]:
    """One stage's process; the main one returns what all of them found."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=place.meeting, rank=place.rank, world_size=place.world)
    ranks, m = Ranks(config.pipeline.stages), setting.canaries
    torch.manual_seed(setting.seed)
    stage = CanaryStage(ranks.stage, ranks.stages, m, level_of(setting), setting.dropout)
    plain = copy.deepcopy(stage)
    engine = make_engine(stage, config.clip)
    assert engine is not None
    here = len(engine.groups)
    plan = plan_run(config, m, 1 if config.clip.grouping == "flat" else round(ranks.agree(here)[0]))
    trainer = build_pipeline_trainer(config, CanaryTask(stage, m), engine, plan, torch.device("cpu"), ranks, None)
    trainer.mechanism.sampler = Present(trainer.mechanism.sampler, present_canaries(setting))
    attacker = Attacker(trainer, plain, lambda model, who: model.own(who), setting)  # type: ignore[operator]
    by_stage = ranks.gather(follow(setting, attacker, plan))
    dist.destroy_process_group()
    together = [sum(parts[1:], parts[0]) for parts in zip(*by_stage, strict=True)]
    return {"plan": plan.to_dict(), "evidence": together}
