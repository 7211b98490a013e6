"""Three small language models in float64 and their trainers on any number of processes, made as `run.py` makes them."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from groupwise.build import build_trainer
from groupwise.config.schema import ClipConfig, NoiseConfig, OptimConfig, ParallelConfig, RunConfig
from groupwise.privacy import make_plan
from groupwise.tasks.text_task import token_losses
from groupwise.torchvision_import import import_torchvision
from groupwise.training.from_config import make_engine
from groupwise.training.ranks import Alone, Ranks
from groupwise.training.step import Trainer
from groupwise.training.task import Task
from tests.checked import checked_once
from tests.training.data_parallel import Batches

EXAMPLES, WORDS, LENGTH = 16, 23, 7
"""A vocabulary that two processes share out unevenly."""
THRESHOLDS = {"gpt2": 1.0, "gpt2 untied": 1.0, "llama": 1.0, "roberta": 0.2}
"""C, such that some examples are clipped in some groups and others are not."""
BATCHES = ([0, 1, 2, 3, 5, 7, 8], [], [4, 6, 9, 11, 13])
MODES = {
    "adaptive_layer": ClipConfig(threshold=0.5, quantile_budget=0.1, rescale=True),
    "fixed_layer": ClipConfig("fixed_layer", policy="fixed", threshold=0.5),
    "adaptive_block": ClipConfig("adaptive_block", grouping="block", threshold=0.5, quantile_budget=0.1),
    "flat": ClipConfig("flat", grouping="flat", policy="fixed", threshold=0.5, rescale=False),
    "adaptive_flat": ClipConfig("adaptive_flat", grouping="flat", threshold=0.5, quantile_budget=0.1, rescale=False),
    "ghost": ClipConfig("ghost", grouping="flat", norms="ghost", policy="fixed", threshold=0.5, rescale=False),
    "per_device": ClipConfig(
        "per_device", grouping="device", policy="adaptive", threshold=0.5, quantile_budget=0.1, rescale=False
    ),
    "none": ClipConfig("none", grouping="none", policy="fixed"),
}


def make_model(kind: str, dropout: float = 0.0) -> nn.Module:
    """The whole model, the same in every process."""
    import_torchvision()
    import transformers as t

    torch.manual_seed(0)
    if kind.startswith("gpt2"):
        rates = {"attn_pdrop": dropout, "resid_pdrop": dropout, "embd_pdrop": dropout}
        config: Any = t.GPT2Config(
            vocab_size=WORDS, n_positions=LENGTH, n_embd=8, n_layer=2, n_head=2, **rates,
            tie_word_embeddings="untied" not in kind,
        )  # fmt: skip
        return t.GPT2LMHeadModel(config).double().train()
    shape = {"vocab_size": WORDS, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1}
    if kind == "llama":
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
        return t.LlamaForCausalLM(t.LlamaConfig(**shape, **heads)).double().train()
    assert kind == "roberta"
    config = t.RobertaConfig(
        **shape, num_attention_heads=2, max_position_embeddings=LENGTH + 2, hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout, num_labels=3, pad_token_id=1, type_vocab_size=1,
    )  # fmt: skip
    return t.RobertaForSequenceClassification(config).double().train()


class TokensTask(Task):
    """Random tokens to predict one after the other, or to classify."""

    train_size = EXAMPLES

    def __init__(self, kind: str = "gpt2", dropout: float = 0.0) -> None:
        self.model: Any = make_model(kind, dropout)
        generator = torch.Generator().manual_seed(1)
        self.tokens = torch.randint(2, WORDS, (EXAMPLES, LENGTH), generator=generator)
        self.classes = torch.randint(0, 3, (EXAMPLES,), generator=generator) if kind == "roberta" else None

    def losses(self, examples):
        rows = torch.as_tensor(np.asarray(examples), dtype=torch.int64)
        tokens = self.tokens[rows]
        logits = self.model(input_ids=tokens).logits
        if self.classes is not None:
            return F.cross_entropy(logits, self.classes[rows], reduction="none")
        return token_losses(logits[:, :-1], tokens[:, 1:]).sum(1)

    @torch.no_grad()
    def evaluate(self, split, batch_size, limit=None, final=False):
        self.model.eval()
        found = {"loss": float(self.losses(range(EXAMPLES)).mean())}
        self.model.train()
        return found

    def describe_data(self):
        return {}


_CUT: set[tuple[str, str]] = set()


@contextmanager
def cut_checked_once(mode: str, kind: str) -> Iterator[None]:
    """Losses and norms of a model before and after it is cut are compared once in a process for each way of clipping
    it: what comes later has the same weights and is cut the same."""
    with pytest.MonkeyPatch.context() as patch:
        if (mode, kind) in _CUT:
            patch.setattr("groupwise.tensor.trainer._measured", lambda *_: (torch.zeros(0), torch.zeros(0, 0)))
        yield
    _CUT.add((mode, kind))


def build(
    mode: str,
    ranks: Alone | Ranks,
    kind: str = "gpt2",
    sigma: float = 0.0,
    *,
    optim: OptimConfig | None = None,
    batches: Sequence[Sequence[int]] = BATCHES,
    allocation: str | None = None,
    dropout: float = 0.0,
    task: Task | None = None,
) -> Trainer:
    """The trainer of this process, with microbatches of 3."""
    clip, task = replace(MODES[mode], threshold=THRESHOLDS[kind]), task or TokensTask(kind, dropout)
    device = clip.grouping == "device"
    config = RunConfig(
        clip=clip,
        noise=NoiseConfig(allocation or ("equal_budget" if device else "global")),
        optim=optim or OptimConfig(learning_rate=0.5),
        parallel=ParallelConfig(ranks.parts, "tensor"),
    )
    config.train.microbatch, config.debug.noise_seed = 3, 7
    engine = make_engine(task.model, clip)
    groups = 1 if engine is None else len(engine.groups)
    plan = make_plan(
        dataset_size=EXAMPLES,
        expected_batch_size=8,
        steps=len(batches),
        delta=1e-5,
        noise_multiplier=0.0 if engine is None else sigma,
        num_groups=groups * (ranks.parts if device else 1),
        quantile_budget=clip.quantile_budget if clip.policy == "adaptive" else 0.0,
        accountant="rdp",
    )
    checked = checked_once((mode, kind) if isinstance(ranks, Alone) else "one of several processes")
    with checked, cut_checked_once(mode, kind):
        trainer = build_trainer(config, task, engine, plan, torch.device("cpu"), ranks, None)
    trainer.mechanism.sampler = Batches(batches)
    return trainer


def steps(trainer: Trainer, start: int = 0) -> list[dict[str, float]]:
    """Run the steps that are left as a session does; returns their reports."""
    return [trainer.report(trainer.ranks.agree(*trainer.step(step))) for step in range(start, trainer.plan.steps)]


def parameters(trainer: Trainer) -> torch.Tensor:
    """All of them, whole, in one vector; empty on all but the first process."""
    state = trainer.state_dict()["model"]
    return torch.cat([value.flatten() for value in state.values()]) if state else torch.zeros(0)
