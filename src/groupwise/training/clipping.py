"""From a configuration to an engine and its threshold policy."""

import math

from torch import nn

from groupwise.clipping import (
    ClippingEngine,
    attach,
    automatic_factors,
    by_mapping,
    clip_factors,
    flat,
    per_block,
    per_layer,
)
from groupwise.clipping.factors import ClipRule
from groupwise.config import ClipConfig
from groupwise.errors import UserError
from groupwise.privacy import AdaptiveThresholds, FixedThresholds, PrivacyPlan

_PARTITIONS = {"flat": flat, "device": flat, "layer": per_layer, "block": per_block}


def make_engine(model: nn.Module, clip: ClipConfig, direct: bool = False) -> ClippingEngine | None:
    """Attach the configured clipping to the model; None for `clip.grouping=none`, plain SGD through the same loop.

    `direct` is for a model whose parameters are in shards (FSDP2).
    """
    if clip.grouping == "none":
        return None
    if clip.grouping == "custom":
        partition = by_mapping(model, clip.mapping)
    elif clip.grouping in _PARTITIONS:
        partition = _PARTITIONS[clip.grouping](model)
    else:
        raise UserError(f"clip.grouping={clip.grouping} is not known: none, flat, layer, block, device or custom.")
    return attach(
        model,
        partition,
        _even(clip, len(partition)),
        norms=clip.norms,  # type: ignore[arg-type]
        clip_rule=clip_rule_of(clip),
        formula=clip.formula,  # type: ignore[arg-type]
        direct=direct,
    )


def clip_rule_of(clip: ClipConfig) -> ClipRule:
    """The function that `clip.rule` names."""
    if clip.rule == "automatic":
        return automatic_factors(clip.gamma)
    return clip_factors


def make_thresholds(
    clip: ClipConfig, plan: PrivacyPlan, here: int | None = None
) -> FixedThresholds | AdaptiveThresholds:
    """C_k = C/√K, fixed (appendix A.1), or the start of private quantile estimates (Algorithm 1, lines 15-18).

    `here` is how many of the K groups this process hosts, where it hosts one stage of a pipeline.
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
        rescale_to=clip.threshold if clip.rescale else None,
        count_at=clip.count_at,
    )


def _even(clip: ClipConfig, groups: int) -> float:
    """C/√K: K groups of this threshold clip the whole gradient to norm C."""
    return clip.threshold / math.sqrt(groups)
