"""Trains what `run.py` trains with `PrivateTrainer`: the same model, examples, settings and key.

As a program it trains until its process kills itself: python -m tests.integrations.suite FOLDER STEP WORD ...
"""

import os
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import groupwise.integrations  # noqa: F401  # isort: skip  # before transformers
from transformers import RobertaForSequenceClassification, TrainerCallback, TrainingArguments
from transformers.modeling_outputs import SequenceClassifierOutput

from groupwise.config.compose import compose_run
from groupwise.config.schema import RunConfig
from groupwise.integrations.transformers import PrivacyArguments, PrivateTrainer
from groupwise.privacy import NoiseSource
from groupwise.tasks.text_classification import Examples, TextClassification, make_text_classification
from groupwise.training.from_config import make_optimizer, make_schedule

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")


def configured(*words: str) -> RunConfig:
    """The configuration of a run on SST-2, from the command line's words."""
    return compose_run(["task=sst2", "clip=adaptive_layer", *words], ROOT / "conf")


class MeanRoberta(RobertaForSequenceClassification):
    """The classifier of `model.pool=mean`: its head reads the mean over the tokens."""

    accepts_loss_kwargs = False

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, token_type_ids=None, labels=None):
        states = self.roberta(input_ids, attention_mask, token_type_ids, position_ids).last_hidden_state
        kept = attention_mask.unsqueeze(-1).to(states.dtype)
        logits = self.classifier((states * kept).sum(1, keepdim=True) / kept.sum(1, keepdim=True))
        loss = None if labels is None else F.cross_entropy(logits, labels)
        return SequenceClassifierOutput(loss=loss, logits=logits)


class Stop(TrainerCallback):
    """SIGKILL, at the beginning of a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


class Logged(TrainerCallback):
    """Keeps the losses of steps, which are in no checkpoint."""

    def __init__(self, losses: dict[int, float]) -> None:
        self.losses = losses

    def on_log(self, args, state, control, logs, **kwargs):
        if "nonprivate/loss" in logs:
            self.losses[state.global_step] = logs["nonprivate/loss"]


def accuracy(found: Any) -> dict[str, float]:
    return {"accuracy": float((np.argmax(found.predictions, 1) == found.label_ids).mean())}


def rows(part: Examples) -> list[dict[str, Any]]:
    """The examples of a split as the Trainer takes them."""
    return [{"input_ids": part.tokens[i].tolist(), "labels": int(part.labels[i])} for i in range(len(part))]


def trainer_of(config: RunConfig, folder: Path, steps: int, save: int, *callbacks: TrainerCallback) -> PrivateTrainer:
    """The trainer of a run's configuration, which must give batch size, microbatch and noise seed.

    Its own are the loop and the batches' order alone; optimiser and learning rates are made by the run's functions.
    """
    torch.manual_seed(config.seed)
    task: TextClassification = make_text_classification(config, CPU)
    original: Any = task.model
    model = MeanRoberta(original.config)
    model.load_state_dict(original.state_dict())

    def collate(examples: list[dict[str, Any]]) -> dict[str, Any]:
        tokens = [np.array(example["input_ids"], dtype=np.int32) for example in examples]
        return task.inputs(tokens, CPU) | {"labels": torch.tensor([example["labels"] for example in examples])}

    train, microbatch = config.train, config.train.microbatch
    assert train.batch_size is not None and microbatch is not None and config.debug.noise_seed is not None
    accumulated, rest = divmod(train.batch_size, microbatch)
    assert not rest
    optimizer = make_optimizer(model.parameters(), config.optim)
    args = TrainingArguments(
        str(folder),
        per_device_train_batch_size=microbatch,
        gradient_accumulation_steps=accumulated,
        per_device_eval_batch_size=config.eval.batch_size,
        max_steps=steps,
        save_steps=save,
        logging_steps=save,
        train_sampling_strategy="group_by_length",
        max_grad_norm=0.0,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    return PrivateTrainer(
        model,
        args,
        privacy=PrivacyArguments(
            epsilon=config.privacy.epsilon, accountant=config.privacy.accountant, clip=config.clip
        ),
        train_dataset=rows(task._train),
        eval_dataset=rows(task._valid[""]),
        data_collator=collate,
        compute_metrics=accuracy,
        optimizers=(optimizer, make_schedule(optimizer, config.optim, steps)),
        noise_source=NoiseSource.from_seed(config.debug.noise_seed),
        callbacks=list(callbacks),
    )


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


if __name__ == "__main__":
    folder, steps, save, end, *words = sys.argv[1:]
    torch.set_num_threads(1)
    trainer_of(configured(*words), Path(folder), int(steps), int(save), Stop(int(end))).train()
