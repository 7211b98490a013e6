"""Pipelines small enough for tests: two models in float64, texts of unequal lengths, and given batches."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from groupwise.build import losses_of_stage
from groupwise.config.schema import ClipConfig, OptimConfig
from groupwise.pipeline.runner import StageRunner
from groupwise.pipeline.split import choose_ranges, cut
from groupwise.pipeline.trainer import PipelineTrainer, StageSums
from groupwise.privacy import AdaptiveThresholds, FixedThresholds, NoiseSource, make_plan
from groupwise.tasks.samples import Samples
from groupwise.tasks.text_generation import TextFeed
from groupwise.torchvision_import import import_torchvision
from groupwise.training.from_config import make_engine, make_optimizer, make_schedule
from groupwise.training.private_step import PrivateStep
from groupwise.training.ranks import Ranks
from tests.tiny_training import Batches, Trained

WORDS, EXAMPLES, EXPECTED, LEARNING_RATE, MICROBATCH = 20, 16, 8, 0.5, 3
QUANTILE, STEP = 0.6, 0.3
THRESHOLDS = {"gpt2": 1.0, "lora": 0.3}
"""C, such that some examples are clipped and others are not."""
BATCHES: tuple[tuple[int, ...], ...] = ((0, 1, 2, 3, 5, 7, 9, 10, 12, 14, 15), (), (4, 6, 8, 11, 13))
"""The second batch is empty, and none fills its last microbatch."""


@dataclass(frozen=True)
class Case:
    """The settings of one run of a pipeline."""

    model: str = "gpt2"
    stages: int = 2
    grouping: str = "device"
    policy: str = "fixed"
    rematerialize: bool = False
    sigma: float = 0.0
    dropout: float = 0.0


class Texts:
    """Token ids of unequal lengths, each with a target at its end."""

    def __init__(self) -> None:
        random = np.random.default_rng(0)
        self.rows = [random.integers(0, WORDS, length) for length in random.integers(4, 15, EXAMPLES)]
        self.starts = np.array([random.integers(1, len(row)) for row in self.rows])

    def feed(self) -> TextFeed:
        return TextFeed(Samples(list(self.rows), 0, self.starts), 0, 16, torch.device("cpu"))


def gpt2(blocks: int = 4, words: int = WORDS, **options: Any) -> nn.Module:
    """A causal model of that many blocks and tokens, with weights drawn from the default generator."""
    import_torchvision()
    from transformers import GPT2Config, GPT2LMHeadModel

    shape = {"n_layer": blocks, "n_embd": 8, "n_head": 2, "n_positions": 16, "vocab_size": words}
    return GPT2LMHeadModel(GPT2Config(**shape, bos_token_id=0, eos_token_id=0, **options))


def make_model(case: Case) -> nn.Module:
    """The whole model, the same in every process."""
    torch.manual_seed(0)
    rates = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), case.dropout)
    model: Any = gpt2(**rates, tie_word_embeddings=False)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    if case.model == "lora":
        import peft

        model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True))
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(parameter, std=0.3)
    return model.double()


class Given(Trained):
    """A task that only has a model, as the data come from a feed."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.train_size = model, EXAMPLES


def make_trainer(case: Case, ranks: Ranks, batches=BATCHES) -> PipelineTrainer:
    """The trainer of this process's stage; with one process, of a pipeline of one stage."""
    model = make_model(case)
    stage = cut(model, choose_ranges(model, case.stages), ranks.stage, rematerialize=case.rematerialize)
    device = torch.device("cpu")
    engine = make_engine(stage, ClipConfig(grouping=case.grouping, policy=case.policy))
    feed = Texts().feed()
    if engine is not None:
        some = feed.microbatches(feed.order(np.arange(EXAMPLES)), EXAMPLES)[0]
        engine.trace(losses_of_stage(stage, some, device), range(EXAMPLES))
    here = 1 if engine is None else len(engine.groups)
    one_group = case.grouping == "flat"
    groups = 1 if one_group else round(ranks.agree(here / ranks.replicas)[0])
    plan = make_plan(
        dataset_size=EXAMPLES,
        expected_batch_size=EXPECTED,
        steps=1000,
        delta=1e-5,
        noise_multiplier=0.0 if engine is None else case.sigma,
        num_groups=groups,
        quantile_budget=0.1 if case.policy == "adaptive" and case.sigma else 0.0,
        accountant="rdp",
    )
    thresholds = None if engine is None else make_thresholds(case, here, groups, plan.count_noise_multiplier)
    optim = OptimConfig(learning_rate=LEARNING_RATE)
    optimizer = make_optimizer(stage.parameters(), optim)
    runner = StageRunner(stage, engine, device, getattr(ranks, "pipeline", None))
    trainer = PipelineTrainer(
        task=Given(stage),
        private=PrivateStep(
            model=stage,
            engine=engine,
            thresholds=thresholds,
            plan=plan,
            noise=NoiseSource.from_seed(7),
            allocation="equal_budget",
            optimizer=optimizer,
            device=device,
            sums=StageSums(runner, feed, MICROBATCH, one_group),
            ranks=ranks,
        ),
        schedule=make_schedule(optimizer, optim, 1000),
    )
    trainer.private.sampler = Batches(batches)
    return trainer


def make_thresholds(case: Case, here: int, groups: int, noise: float) -> FixedThresholds | AdaptiveThresholds:
    """C/√K for each group of this stage."""
    start = [THRESHOLDS[case.model] / math.sqrt(groups)] * here
    if case.policy == "fixed":
        return FixedThresholds(start)
    return AdaptiveThresholds(start, QUANTILE, STEP, noise, EXPECTED)
