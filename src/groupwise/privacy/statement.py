"""The privacy plan in words: what is promised, under which reading of the data, and what is not covered."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from groupwise.privacy.plan import PrivacyPlan

_LIMITS = (
    "  Public: the number of examples and all settings. Not covered: choosing settings by their results, anything\n"
    "  logged under nonprivate/, checkpoints (they hold the noise key), floating-point attacks."
)


def plan_statement(plan: "PrivacyPlan") -> str:
    """Return several lines for a person: guarantee, mechanism, figures, limits."""
    if plan.noise_multiplier == 0.0:
        return f"Privacy: none. No noise is added: there is no privacy guarantee.\n{_sampling(plan)}"
    note = [f"  Note: epsilon was found {plan.note}."] if plan.note else []
    return "\n".join([_headline(plan), _sampling(plan), _noise(plan), *note, _LIMITS])


def _headline(plan: "PrivacyPlan") -> str:
    accountant = plan.accountant.upper()
    if plan.note:  # it says who stood in for the accountant that was asked
        accountant = next((name for name in ("PLD", "RDP") if f"by the {name} " in plan.note), "closed form")
    figure = f"epsilon = {plan.epsilon:.4g} at delta = {plan.delta:g} ({accountant}, upper bound)"
    if plan.sampling == "shuffle":
        return (
            f"Privacy: {figure} as published, not a guarantee: batches are shuffled, but accounted as Poisson samples."
        )
    return f"Privacy: {figure} for adding or removing one training example."


def _sampling(plan: "PrivacyPlan") -> str:
    groups = f"{plan.num_groups} clipping group{'s' if plan.num_groups > 1 else ''}"
    return (
        f"  {plan.steps} steps with batches of {plan.expected_batch_size:g} expected from {plan.dataset_size} examples "
        f"({plan.sampling}, rate {plan.sample_rate:.5g}), {groups}."
    )


def _noise(plan: "PrivacyPlan") -> str:
    sigma = f"  Gaussian noise once a step, noise multiplier sigma = {plan.noise_multiplier:.4f}"
    if plan.quantile_budget == 0.0:
        return f"{sigma}, all of it on gradients."
    return (
        f"{sigma}, of which counts take r = {plan.quantile_budget:g}: sigma_b = {plan.count_noise_multiplier:.4g} on "
        f"counts, sigma_new = {plan.gradient_noise_multiplier:.4f} on gradients."
    )
