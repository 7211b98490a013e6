"""Works out σ for an ε, or ε for a σ, before any training:

python -m groupwise.privacy epsilon=8 delta=1e-5 n=50000 batch=4096 epochs=300
"""

import math
import sys
from collections.abc import Sequence

from groupwise.errors import UserError, command, did_you_mean
from groupwise.privacy.accountants import is_whole
from groupwise.privacy.plan import PrivacyPlan, make_plan

HELP = """python -m groupwise.privacy [key=value ...]

  epsilon=8 or sigma=2.5   the budget, or the noise multiplier: the other follows
  n=50000                  training examples, N
  batch=4096               examples that a step draws in expectation, B
  epochs=300 or steps=T    the length; an epoch is N/B steps
  delta=1e-5               by default N^-1.1
  accountant=prv           or pld, rdp

Prints what is promised, and the epsilon spent along the way."""
NUMBERS = ("epsilon", "sigma", "n", "batch", "epochs", "steps", "delta")
TURNS = 10
"""Lines of the table, at most."""


def read_plan(words: Sequence[str]) -> PrivacyPlan:
    """The plan that the words ask for.

    Raises:
        UserError: a word that is no key=value, a key that is missing or unknown, a value out of range.
    """
    given: dict[str, float] = {}
    accountant = "prv"
    for word in words:
        key, _, text = word.partition("=")
        if key == "accountant":
            accountant = text
            continue
        if key not in NUMBERS:
            raise UserError(f"there is no key {key}{did_you_mean(key, (*NUMBERS, 'accountant'))}; --help lists them.")
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        if not (math.isfinite(number) or word == "epsilon=inf"):
            raise UserError(f"{word} does not fit: a number was expected.")
        given[key] = int(number) if is_whole(number) else number
    for one, other in (("epsilon", "sigma"), ("epochs", "steps")):
        if (one in given) == (other in given):
            raise UserError(f"give one of {one} and {other}; --help lists the keys.")
    if missing := [key for key in ("n", "batch") if key not in given]:
        raise UserError(f"{missing[0]} is missing; --help lists the keys.")
    size, batch = given["n"], given["batch"]
    if not 0 < batch <= size:
        raise UserError(f"batch={batch:g} n={size:g} do not fit: give a batch above 0 and at most n.")
    steps = given["steps"] if "steps" in given else round(given["epochs"] * size / batch)
    return make_plan(
        dataset_size=size,  # type: ignore[arg-type]  # refused where it is not whole
        expected_batch_size=batch,
        steps=steps,  # type: ignore[arg-type]
        delta=given.get("delta", size**-1.1),
        epsilon=given.get("epsilon"),
        noise_multiplier=given.get("sigma"),
        accountant=accountant,
    )


def table(plan: PrivacyPlan) -> list[str]:
    """ε along the way, a line each."""
    steps = sorted({max(1, round(plan.steps * turn / TURNS)) for turn in range(1, TURNS + 1)})
    rows = [f"{step:>9,}  {step * plan.sample_rate:>8.1f}  {plan.spent_epsilon(step):>8.4f}" for step in steps]
    return [f"{'step':>9}  {'epoch':>8}  {'epsilon':>8}", *rows]


@command
def main() -> int:
    """Print the plan's statement and the table; returns the exit code."""
    words = sys.argv[1:]
    if not words or {"-h", "--help"} & {*words}:
        print(HELP)
        return 0
    plan = read_plan(words)
    print(plan.statement(), *table(plan), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
