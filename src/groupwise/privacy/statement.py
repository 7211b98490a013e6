"""The privacy plan in words: what is promised, under which reading of the data, and what is not covered."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from groupwise.privacy.plan import PrivacyPlan


def plan_statement(plan: PrivacyPlan) -> str:
    """Several lines for a person: guarantee, mechanism, figures, limits."""
    return "\n".join([_headline(plan), *_mechanism(plan), _limits(plan)])


def _headline(plan: PrivacyPlan) -> str:
    if math.isinf(plan.epsilon):
        return "Privacy: none. No noise is added, so there is no guarantee of any kind."
    figure = f"epsilon = {plan.epsilon:.4g} at delta = {plan.delta:g} ({plan.accountant.upper()}, upper bound)"
    if plan.sampling == "shuffle":
        return (
            f"Privacy: {figure} as published, not a guarantee: batches are shuffled, but accounted as Poisson samples."
        )
    return f"Privacy: {figure} for adding or removing one training example."


def _mechanism(plan: PrivacyPlan) -> list[str]:
    lines = [
        f"  {plan.steps} releases of Gaussian noise, batches of {plan.expected_batch_size:g} expected from "
        f"{plan.dataset_size} examples ({plan.sampling}, rate {plan.sample_rate:.5g}), {plan.num_groups} clipping "
        f"group{'s' if plan.num_groups > 1 else ''}.",
    ]
    if plan.noise_multiplier > 0:
        split = f"  noise multiplier sigma = {plan.noise_multiplier:.4f}"
        if plan.quantile_budget > 0:
            split += (
                f", of which counts take r = {plan.quantile_budget:g}: sigma_b = {plan.count_noise_multiplier:.4g} on "
                f"counts, sigma_new = {plan.gradient_noise_multiplier:.4f} on gradients"
            )
        lines.append(split + ".")
    if plan.note:
        lines.append(f"  {plan.note}")
    return lines


def _limits(plan: PrivacyPlan) -> str:
    return (
        "  Public: the number of examples and all settings. Not covered: choosing settings by their results, anything logged "
        "under nonprivate/, checkpoints (they hold the noise key), floating-point attacks."
    )
