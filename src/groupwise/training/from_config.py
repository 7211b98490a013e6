"""Makes what a configuration names: engine and threshold policy, optimiser and schedule, precision."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from groupwise.clipping import ClippingEngine, Partition, attach, by_mapping, flat, per_block, per_layer
from groupwise.clipping.factors import CLIP_RULES
from groupwise.config.schema import ClipConfig, OptimConfig
from groupwise.errors import UserError
from groupwise.privacy import AdaptiveThresholds, FixedThresholds, PrivacyPlan, make_plan
from groupwise.training.arithmetic import products

_PARTITIONS = {"flat": flat, "device": flat, "layer": per_layer, "block": per_block}


def make_engine(
    model: nn.Module,
    clip: ClipConfig,
    direct: bool = False,
    *,
    partition: Partition | None = None,
) -> ClippingEngine | None:
    """Attach the configured clipping to the model; None for `clip.grouping=none`, plain SGD through the same loop.

    `direct` is for a model whose parameters are in shards (FSDP2); `partition` replaces `clip.grouping`.
    """
    if clip.grouping == "none":
        return None
    if partition is None:
        custom = clip.grouping == "custom"
        partition = by_mapping(model, clip.mapping) if custom else _PARTITIONS[clip.grouping](model)
    return attach(
        model,
        partition,
        _even(clip, len(partition)),
        norms=clip.norms,  # type: ignore[arg-type]
        clip_rule=CLIP_RULES[clip.rule](clip.gamma),
        formula=clip.formula,  # type: ignore[arg-type]
        direct=direct,
    )


def make_thresholds(
    clip: ClipConfig, plan: PrivacyPlan, here: int | None = None
) -> FixedThresholds | AdaptiveThresholds:
    """C_k = C/√K, fixed (appendix A.1), or as the start of adaptive thresholds (Algorithm 1, lines 15-18).

    `here` is how many of the K groups this process hosts, if it hosts one stage of a pipeline.
    """
    groups = plan.num_groups if here is None else here
    even = _even(clip, plan.num_groups)
    if clip.policy == "fixed":
        return FixedThresholds([even] * groups)
    start = even if clip.initial_threshold is None else clip.initial_threshold
    return AdaptiveThresholds(
        [start] * groups,
        target_quantile=clip.target_quantile,
        learning_rate=clip.quantile_learning_rate,
        count_noise_multiplier=plan.count_noise_multiplier,
        expected_batch_size=plan.expected_batch_size,
        minimum=clip.minimum,
        maximum=clip.maximum,
        rescale_to=clip.threshold if clip.rescale and plan.num_groups > 1 else None,  # one group would be pinned
    )


def plan_of(
    clip: ClipConfig,
    *,
    dataset_size: int,
    batch_size: float,
    epochs: float | None,
    steps: int | None,
    delta: float | None,
    **budget: Any,
) -> PrivacyPlan:
    """The plan of a run of ``steps`` steps, else of ``epochs`` epochs of N / B steps. By default δ = N^-1.1.

    Args:
        clip: adaptive thresholds release counts, which take their share of the budget.
        budget: other arguments of `groupwise.privacy.make_plan`.
    """
    if steps is None:
        steps = max(1, round((epochs or 0) * dataset_size / batch_size))
    return make_plan(
        dataset_size=dataset_size,
        expected_batch_size=batch_size,
        steps=steps,
        delta=dataset_size**-1.1 if delta is None else delta,
        quantile_budget=clip.quantile_budget if clip.policy == "adaptive" else 0.0,
        **budget,
    )


def _even(clip: ClipConfig, groups: int) -> float:
    """C/√K: K groups of this threshold clip the whole gradient to norm C."""
    return clip.threshold / math.sqrt(groups)


def make_optimizer(parameters: Iterable[torch.nn.Parameter], config: OptimConfig) -> Optimizer:
    """SGD, Adam or AdamW over the trainable ones of ``parameters``.

    It sees noisy gradients only, so whatever it computes is post-processing and costs no privacy.
    """
    trainable = [parameter for parameter in parameters if parameter.requires_grad]
    common: dict[str, Any] = {"lr": config.learning_rate, "weight_decay": config.weight_decay}
    if config.name == "sgd":
        return SGD(trainable, momentum=config.momentum, **common)
    kind = {"adam": Adam, "adamw": AdamW}[config.name]
    return kind(trainable, betas=(config.beta1, config.beta2), eps=config.eps, **common)


def make_schedule(optimizer: Optimizer, config: OptimConfig, steps: int) -> LambdaLR:
    """Call ``.step()`` once after each of the ``steps`` updates; the rate depends on the step alone.

    It rises linearly over the first ``warmup * steps`` steps, never from zero, which would waste a release; then it
    stays (constant), or falls (linear, cosine) towards zero, reached only after the last step.
    """
    rising = round(config.warmup * steps)

    def factor(step: int) -> float:
        if step < rising:
            return (step + 1) / rising
        done = min((step - rising) / max(steps - rising, 1), 1.0)
        falls = {"constant": 1.0, "linear": 1.0 - done, "cosine": 0.5 * (1.0 + math.cos(math.pi * done))}
        return falls[config.schedule]

    return LambdaLR(optimizer, factor)


def autocast(precision: str, device: torch.device) -> Callable[[], AbstractContextManager[Any]]:
    """A maker of contexts for the forward pass in `precision`; there is no loss scaling, which would break clipping.

    With "tf32" the backward pass, which computes norms and sums, is float32.
    """
    if precision == "float32":
        return nullcontext
    if precision == "bfloat16":
        return partial(torch.autocast, device.type, torch.bfloat16)
    if device.type != "cuda":
        raise UserError(f"train.precision=tf32 needs an NVIDIA GPU, and this run is on {device.type}: use float32.")
    return partial(products, tf32=True)


def tolerances(precision: str) -> dict[str, float]:
    """Tolerances of the check before training, if losses and norms are computed at reduced precision."""
    return {
        "tf32": {"tolerance": 0.1, "loss_tolerance": 0.01},
        "bfloat16": {"tolerance": 0.3, "loss_tolerance": 0.05},
    }.get(precision, {})
