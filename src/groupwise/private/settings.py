"""Makes the clipping configuration and the privacy plan from the arguments of `make_private`."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from groupwise.clipping import Partition
from groupwise.config.checks import validate_clipping, why_unused
from groupwise.config.schema import ClipConfig, RunConfig
from groupwise.errors import UserError, did_you_mean, warn
from groupwise.privacy import PrivacyPlan
from groupwise.training.from_config import plan_of
from groupwise.training.plain import plain

MODES: dict[str, dict[str, Any]] = {
    "flat": {"grouping": "flat", "policy": "fixed"},
    "ghost": {"grouping": "flat", "norms": "ghost", "policy": "fixed"},
    "fixed_layer": {"grouping": "layer", "policy": "fixed"},
    "fixed_block": {"grouping": "block", "policy": "fixed"},
    "adaptive_flat": {"grouping": "flat", "policy": "adaptive", "rescale": False},
    "adaptive_layer": {"grouping": "layer", "policy": "adaptive"},
    "adaptive_block": {"grouping": "block", "policy": "adaptive"},
}
"""The clipping modes of `conf/clip/`, except for `none` and those of pipelines, which only `run.py` supports."""


def resolve_clip(clip: str | ClipConfig | Partition, threshold: float, settings: Mapping[str, Any]) -> ClipConfig:
    """Make the clipping configuration for a mode, a `ClipConfig` or a partition, with ``settings``: its other fields.

    Raises `UserError` if a mode or setting is unknown, out of range, or has no effect, or nothing would be clipped.
    """
    threshold, settings = plain(threshold), plain(settings)
    given = settings if threshold == ClipConfig.threshold else {"threshold": threshold, **settings}
    if isinstance(clip, ClipConfig):
        if clip.grouping == "none":
            raise UserError("clip.grouping is 'none', which is not private: choose a mode, or train without groupwise.")
        config = replace(clip, **given)
    elif isinstance(clip, str) and clip not in MODES:
        raise UserError(
            f"clip={clip!r} is not a clipping mode{did_you_mean(clip, MODES)}: choose one of {', '.join(MODES)}, or "
            "give a partition."
        )
    else:
        mode = {"name": clip, **MODES[clip]} if isinstance(clip, str) else {"name": "custom", "grouping": "custom"}
        config = ClipConfig(**{"threshold": threshold, **mode, **settings})
    checked = config
    if config.grouping == "custom" and not config.mapping:  # the partition defines the groups
        one = {"grouping": "flat", "rescale": False} if config.norms == "ghost" else {"grouping": "layer"}
        checked = replace(config, **one)  # type: ignore[arg-type]
    try:
        validate_clipping(checked)
    except UserError as error:
        raise UserError(str(error).replace("clip.", "")) from error
    for name, value in given.items():
        if why := why_unused(f"clip.{name}", RunConfig(clip=config)):
            raise UserError(f"{name}={value} changes nothing: {why.replace('clip.', '')}")
    return config


def resolve_plan(
    clip: ClipConfig,
    dataset_size: int,
    num_groups: int,
    plan: PrivacyPlan | None,
    accountant: str,
    budget: Mapping[str, Any],
    length: Mapping[str, Any],
) -> PrivacyPlan:
    """Make the privacy plan of a run, or check the given one; raises `UserError` if arguments do not make one.

    ``budget`` has epsilon and noise_multiplier; ``length`` has batch_size, epochs, steps and delta. None is not given.
    """
    given = sum(value is not None for value in (*budget.values(), plan))
    if given != 1:
        raise UserError(f"{given} of epsilon, noise_multiplier and plan were given: give exactly one of them.")
    batch_size, epochs, steps = length["batch_size"], length["epochs"], length["steps"]
    if plan is not None:
        if any(value is not None for value in length.values()):
            raise UserError("plan sets delta, steps and batch_size: leave out delta, epochs, steps and batch_size.")
        _check_plan(plan, dataset_size, num_groups, adaptive=clip.policy == "adaptive")
        return plan
    if batch_size is None:
        raise UserError("batch_size is missing: give the expected number of examples of a step.")
    if (epochs is None) == (steps is None):
        how = "Neither epochs nor steps was" if steps is None else "Both epochs and steps were"
        raise UserError(f"{how} given: give one of them, as epsilon depends on the number of steps.")
    if not 0 < batch_size <= dataset_size:
        raise UserError(f"batch_size={batch_size} must be above 0, and at most the number of examples, {dataset_size}.")
    if batch_size < 1:
        warn(f"batch_size={batch_size} is a number of examples, not a rate.")
    if steps is None and not 0 < epochs < math.inf:
        raise UserError(f"epochs={epochs} is not a valid length of a run: give a finite number above 0.")
    return plan_of(clip, dataset_size=dataset_size, num_groups=num_groups, accountant=accountant, **budget, **length)


def _check_plan(plan: PrivacyPlan, dataset_size: int, num_groups: int, adaptive: bool) -> None:
    """Raise a `UserError` if the plan is for another sampling, dataset size, number of groups or kind of threshold."""
    if plan.sampling != "poisson":
        raise UserError(
            f"The plan is for sampling={plan.sampling!r}, which guarantees nothing: make one for 'poisson'."
        )
    for name, there in {"dataset_size": dataset_size, "num_groups": num_groups}.items():
        if (planned := getattr(plan, name)) != there:
            raise UserError(f"The plan is for {name}={planned}, but this run has {there}: make a plan for this run.")
    if (plan.quantile_budget > 0) != adaptive:
        raise UserError(
            f"The plan has quantile_budget={plan.quantile_budget:g}, but {'adaptive' if adaptive else 'fixed'} "
            f"thresholds need {'a value above 0' if adaptive else 'the value 0'}: make a plan with that."
        )
    if (spent := plan.spent_epsilon(plan.steps)) > plan.epsilon * (1 + 1e-6):
        raise UserError(
            f"The plan states epsilon={plan.epsilon:g}, but its noise gives {spent:.4g} by {plan.accountant}: make it "
            "with make_plan, and do not change it."
        )
