"""Computes σ for a given ε, or ε for a given σ, before any training:

python -m groupwise.privacy epsilon=8 delta=1e-5 n=50000 batch=4096 epochs=300
"""

import sys
from dataclasses import dataclass

from groupwise.errors import UserError
from groupwise.options import command, option
from groupwise.privacy.accountants import best_run_epsilon, logseries_argument
from groupwise.privacy.accounting import ACCOUNTANTS
from groupwise.privacy.plan import PrivacyPlan, folded, make_plan


@dataclass
class Options:
    """The options of the command line."""

    epsilon: float | None = option(None, "the budget; sigma is computed from it", infinite=True)
    sigma: float | None = option(None, "instead of epsilon: noise multiplier; epsilon is computed from it", zero=True)
    n: int | None = option(None, "number of training examples, N")
    batch: float | None = option(None, "expected batch size, B")
    epochs: float | None = option(None, "length of the training; an epoch is N/B steps")
    steps: int | None = option(None, "instead of epochs: number of steps, T")
    delta: float | None = option(None, "default: N^-1.1")
    accountant: str = option("prv", f"one of {', '.join(ACCOUNTANTS)}", among=ACCOUNTANTS)
    runs: float | None = option(None, "expected number of runs, for a search that releases only its best run")


def plan_of(given: Options) -> PrivacyPlan:
    """Return the plan for these options. Raises `UserError` for an option that is missing or out of range."""
    for one, other in (("epsilon", "sigma"), ("epochs", "steps")):
        if (getattr(given, one) is None) == (getattr(given, other) is None):
            raise UserError(f"give one of {one} and {other}; --help lists the keys.")
    size, batch = given.n, given.batch
    if size is None or batch is None:
        raise UserError(f"{'batch' if size else 'n'} is missing; --help lists the keys.")
    if batch > size:
        raise UserError(f"batch={batch:g} is more than n={size}; give a batch of at most n.")
    steps = round(given.epochs * size / batch) if given.steps is None else given.steps  # type: ignore[operator]
    return make_plan(
        dataset_size=size,
        expected_batch_size=batch,
        steps=steps,
        delta=size**-1.1 if given.delta is None else given.delta,
        epsilon=given.epsilon,
        noise_multiplier=given.sigma,
        accountant=given.accountant,
    )


def table(plan: PrivacyPlan) -> list[str]:
    """Return ε at each tenth of the training, as lines of a table."""
    steps = sorted({max(1, round(plan.steps * tenth / 10)) for tenth in range(1, 11)})
    rows = [f"{step:>9,}  {step * plan.sample_rate:>8.1f}  {plan.spent_epsilon(step):>8.4f}" for step in steps]
    return [f"{'step':>9}  {'epoch':>8}  {'epsilon':>8}", *rows]


def search(plan: PrivacyPlan, runs: float) -> str:
    """Return a sentence with the ε of the best of a random number of such trainings."""
    epsilon = best_run_epsilon(plan.noise_multiplier, plan.sample_rate, plan.steps, plan.delta, runs)
    return folded(
        f"Search: epsilon = {epsilon:.4g} at delta = {plan.delta:g} for the best of K such trainings, if K is drawn "
        f"once by numpy.random.default_rng().logseries({logseries_argument(runs):.9g}), {runs:g} in expectation, and "
        "the best model alone is released."
    )


def run(given: Options) -> None:
    """Print the plan's statement, the table, and the cost of a search if ``runs`` is given."""
    plan = plan_of(given)
    cost = [] if given.runs is None else [search(plan, given.runs)]
    print(plan.statement(), *table(plan), *cost, sep="\n")


main = command(Options, run)

if __name__ == "__main__":
    sys.exit(main())
