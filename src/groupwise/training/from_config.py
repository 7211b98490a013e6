"""Makes the clipping engine, thresholds, plan, optimiser, schedule and precision that a configuration asks for."""

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
from groupwise.clipping.precision import with_tf32
from groupwise.config.schema import ClipConfig, OptimConfig
from groupwise.errors import UserError
from groupwise.privacy import AdaptiveThresholds, FixedThresholds, PrivacyPlan, make_plan

_PARTITIONS = {"flat": flat, "device": flat, "layer": per_layer, "block": per_block}


def make_engine(
    model: nn.Module, clip: ClipConfig, direct: bool = False, *, partition: Partition | None = None
) -> ClippingEngine | None:
    """Attach the configured clipping to the model; returns None for `clip.grouping=none`, which trains without it.

    `direct` is for sharded parameters (FSDP2). A `partition` replaces the groups of `clip.grouping`.
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
    """Fixed thresholds C_k = C/√K (appendix A.1), or adaptive ones that start there (Algorithm 1, lines 15-17).

    A stage of a pipeline has `here` of the K groups.
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
        rescale_to=clip.threshold if clip.rescale and plan.num_groups > 1 else None,  # with one group, C_1 = C always
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
    """Make the privacy plan of a run of ``steps``, or of ``epochs`` of N / B steps; ``delta`` is N^-1.1 by default.

    Adaptive thresholds get a part of the budget, as they release noisy counts. For ``budget`` see `make_plan`.
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
    """C/√K: if K groups have this threshold, the norm of the whole gradient is at most C."""
    return clip.threshold / math.sqrt(groups)


def make_optimizer(parameters: Iterable[torch.nn.Parameter], config: OptimConfig) -> Optimizer:
    """Make SGD, Adam or AdamW for the trainable ones of ``parameters``.

    An optimiser gets only noisy gradients. So it is post-processing, which costs no privacy.
    """
    trainable = [parameter for parameter in parameters if parameter.requires_grad]
    common: dict[str, Any] = {"lr": config.learning_rate, "weight_decay": config.weight_decay}
    if config.name == "sgd":
        return SGD(trainable, momentum=config.momentum, **common)
    kind = {"adam": Adam, "adamw": AdamW}[config.name]
    return kind(trainable, betas=(config.beta1, config.beta2), eps=config.eps, **common)


def make_schedule(optimizer: Optimizer, config: OptimConfig, steps: int) -> LambdaLR:
    """Make the learning rate schedule; call its ``.step()`` after each of the ``steps`` updates.

    The learning rate rises linearly over the first ``warmup * steps`` steps. Its first value is above zero, as a step
    with rate zero would spend privacy for nothing. Then it is constant, or falls (linear, cosine) to zero after the
    last step.
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
    """A function that returns the context in which a forward pass runs in `precision`.

    With "tf32" the backward pass, which computes norms and sums, is in float32. There is no loss scaling, as it would
    scale the gradients before clipping.
    """
    if precision == "float32":
        return nullcontext
    if precision == "bfloat16":
        return partial(torch.autocast, device.type, torch.bfloat16)
    if device.type != "cuda":
        raise UserError(f"train.precision=tf32 needs an NVIDIA GPU, but this run is on {device.type}: use float32.")
    return partial(with_tf32, True)


def tolerances(precision: str) -> dict[str, Any]:
    """The tolerances of `verify` for losses and norms in TF32; {} (its defaults) for any other precision."""
    return {"tolerance": 0.1, "loss_tolerance": 0.01} if precision == "tf32" else {}
