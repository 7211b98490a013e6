"""The bare private step on data that lie ready: losses, clipped backward, noise, optimiser, and nothing around it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from groupwise.privacy import NoiseSource, release_gradients
from groupwise.training.from_config import autocast
from groupwise.training.step import Trainer

Microbatch = tuple[tuple[Any, ...], Tensor]


class BareStep:
    """Steps of a classifier's `Trainer` without its loop: the same model, engine, optimiser and microbatches."""

    def __init__(self, trainer: Trainer, precision: str) -> None:
        self._trainer = trainer
        self._precision = autocast(precision, trainer.device)
        self._trainable = [p for p in trainer.task.model.parameters() if p.requires_grad]
        self._classes = self._count_classes()
        self._noise = NoiseSource.from_seed(0)  # never the run's own key: its noise is used once

    def load(self, examples: np.ndarray) -> list[Microbatch]:
        """The model's inputs for these examples, with labels (n,): one pair for each microbatch of the loop.

        The labels are drawn at random, as a task does not show its own; they do not change what a step costs.
        """
        size = self._trainer.microbatch
        return [self._inputs(examples[start : start + size]) for start in range(0, len(examples), size)]

    def step(self, step: int, batch: list[Microbatch]) -> None:
        """One update; thresholds stay where they are."""
        trainer = self._trainer
        trainer.mechanism.clear()
        for inputs, labels in batch:
            self._backward(inputs, labels)
        self._release(step)
        trainer.mechanism.optimizer.step()

    def _backward(self, inputs: tuple[Any, ...], labels: Tensor) -> None:
        """One microbatch; a function of its own, so that nothing of it is alive in the next."""
        with self._precision():
            logits = self._trainer.task.model(*inputs)
        losses = F.cross_entropy(logits.float(), labels, reduction="none")
        if self._trainer.engine is None:
            losses.sum().backward()
        else:
            self._trainer.engine.backward(losses)

    def _release(self, step: int) -> None:
        trainer, batch_size = self._trainer, self._trainer.plan.expected_batch_size
        if trainer.engine is None or trainer.thresholds is None:
            for parameter in self._trainable:
                if parameter.grad is not None:
                    parameter.grad.div_(batch_size)
            return
        release_gradients(
            trainer.engine.sensitivity("add_remove"),
            allocation=trainer.mechanism.allocation,
            noise_multiplier=trainer.plan.gradient_noise_multiplier,
            expected_batch_size=batch_size,
            noise=self._noise,
            step=step,
        )

    @torch.no_grad()
    def _inputs(self, examples: np.ndarray) -> Microbatch:
        """What the task hands its model, caught on the way in; the model itself does not run."""
        handle = self._trainer.task.model.register_forward_pre_hook(_catch)
        try:
            self._trainer.task.losses(examples)
        except _CaughtError as caught:
            labels = torch.randint(self._classes, (len(examples),), device=self._trainer.device)
            return caught.inputs, labels
        finally:
            handle.remove()
        raise AssertionError("the task's losses do not come from its model")

    @torch.no_grad()
    def _count_classes(self) -> int:
        widths: list[int] = []
        model = self._trainer.task.model
        handle = model.register_forward_hook(lambda module, inputs, logits: widths.append(logits.shape[1]))
        try:
            self._trainer.task.losses([0])
        finally:
            handle.remove()
        return widths[0]


class _CaughtError(Exception):
    def __init__(self, inputs: tuple[Any, ...]) -> None:
        super().__init__()
        self.inputs = inputs


def _catch(module: nn.Module, inputs: tuple[Any, ...]) -> None:
    raise _CaughtError(inputs)
