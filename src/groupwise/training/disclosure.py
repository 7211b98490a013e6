"""Chooses what of a run may go out with its model, and says between which data sets ε is promised.

Public, by the convention of docs/privacy.md: N, and every setting. A private release: what follows from the noisy sums
and counts alone. Held-out metrics are computed from such releases and from other people's examples. All else that is
computed from the training examples is called `nonprivate/...`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from groupwise.config.identity import config_hash, stable_config
from groupwise.config.schema import RunConfig
from groupwise.privacy import PrivacyPlan
from groupwise.rows import HELD_OUT


def neighbours_of(config: RunConfig) -> str:
    """Between which training sets ε is promised: those that differ by one example, after any choice of the N."""
    chosen = [f"data.{key}={value}" for key in ("holdout", "train_limit") if (value := getattr(config.data, key))]
    return (
        "one training example" if not chosen else f"one of the N examples that {' and '.join(chosen)} left to train on"
    )


def provenance_of(
    config: RunConfig,
    plan: PrivacyPlan,
    private: bool,
    git: Mapping[str, Any],
    description: Mapping[str, Any],
    metrics: Mapping[str, float],
) -> dict[str, Any]:
    """What stands beside an exported model, field by field on an allow list.

    Args:
        private: whether ε is a guarantee.
        git: of the record.
        description: of the data; told in full only where no noise was added, as the weights then give them away anyhow.
        metrics: the final ones. With noise those on held-out examples alone are told, and with `data.holdout`, where
            these are a part of the training set, only those on the test set.
    """
    told: dict[str, Any] = {
        "hash": config_hash(config),
        "config": stable_config(config),
        "git": {key: git[key] for key in ("sha", "dirty")},
        "privacy": {"private": private, "neighbours_differ_by": neighbours_of(config), **plan.to_dict()},
    }
    if plan.noise_multiplier == 0.0:
        return {**told, "data": dict(description), "metrics": dict(metrics)}
    elsewhere = HELD_OUT[1:] if config.data.holdout else HELD_OUT
    return {**told, "metrics": {key: value for key, value in metrics.items() if key.startswith(elsewhere)}}
