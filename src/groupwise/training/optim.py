"""Optimisers and learning-rate schedules, all of them torch's."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from groupwise.config import OptimConfig
from groupwise.errors import UserError


def make_optimizer(parameters: Iterable[torch.nn.Parameter], config: OptimConfig) -> Optimizer:
    """SGD, Adam or AdamW over the trainable ones of ``parameters``; raises `UserError` for another name.

    It sees noisy gradients only, so whatever it computes is post-processing and costs no privacy.
    """
    trainable = [parameter for parameter in parameters if parameter.requires_grad]
    rate, decay = config.learning_rate, config.weight_decay
    betas = (config.beta1, config.beta2)
    match config.name:
        case "sgd":
            return SGD(trainable, lr=rate, momentum=config.momentum, weight_decay=decay)
        case "adam":
            return Adam(trainable, lr=rate, betas=betas, eps=config.eps, weight_decay=decay)
        case "adamw":
            return AdamW(trainable, lr=rate, betas=betas, eps=config.eps, weight_decay=decay)
    raise UserError(f"optim.name={config.name} is not one of sgd, adam, adamw.")


def make_schedule(optimizer: Optimizer, config: OptimConfig, steps: int) -> LambdaLR:
    """Call ``.step()`` once after each of the ``steps`` updates; the rate depends on the step alone."""
    return LambdaLR(optimizer, lambda step: rate_factor(step, steps, config.schedule, config.warmup))


def rate_factor(step: int, steps: int, schedule: str, warmup: float) -> float:
    """What the learning rate is multiplied with at ``step`` (0-based) of ``steps``.

    It rises linearly to 1 over the first ``warmup * steps`` steps, never from zero, which would waste a
    release; then it stays (constant), or falls (linear, cosine) towards zero, reached only after the last
    step.
    """
    rising = round(warmup * steps)
    if step < rising:
        return (step + 1) / rising
    done = min((step - rising) / max(steps - rising, 1), 1.0)
    match schedule:
        case "constant":
            return 1.0
        case "linear":
            return 1.0 - done
        case "cosine":
            return 0.5 * (1.0 + math.cos(math.pi * done))
    raise UserError(f"optim.schedule={schedule} is not one of constant, linear, cosine.")
