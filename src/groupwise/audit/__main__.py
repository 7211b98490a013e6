"""Audits a clipping mode with canaries:  python -m groupwise.audit clip=adaptive_layer privacy.epsilon=3

`--help` lists the options. Exit codes: 0; 1 for a bound above the claim; 2 for a mistake on the command line.
"""

import argparse
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import numpy as np

from groupwise.atomic import write_text
from groupwise.audit.attacker import log_ratio, power_if_clipped
from groupwise.audit.bounds import CONFIDENCE, one_run_epsilon
from groupwise.audit.one_run import audit_one_run, audit_pipeline, choose_guesses, count_right, present_canaries
from groupwise.audit.options import DESIGNS, PLAYS, Setting, make_setting
from groupwise.audit.two_worlds import audit_two_worlds
from groupwise.config.sentences import COMPOSITION_ERRORS, in_one_sentence
from groupwise.errors import BUG, ProcessFailed, UserError, command, report
from groupwise.privacy import PrivacyPlan
from groupwise.rows import csv_text


@dataclass(frozen=True)
class Finding:
    """The result of an audit.

    Args:
        guesses, correct: guesses and right guesses in the one-run game. For two worlds, the number of plays and None.
        bound: the lower bound on ε, with confidence `CONFIDENCE`.
    """

    setting: Setting
    plan: PrivacyPlan
    guesses: int
    correct: int | None
    bound: float
    seconds: float
    share: float | None = None
    """For two worlds: the norm of the example's mean gradient divided by the sensitivity."""

    @property
    def kept(self) -> bool:
        """Whether the bound is at most the claim."""
        return self.bound <= self.plan.epsilon


def audit_mode(setting: Setting) -> Finding:
    """Audit a clipping mode; raises `UserError` for a setting that cannot be audited."""
    began = time.monotonic()
    if DESIGNS[setting.design].real:
        plan, bound, share = audit_two_worlds(setting)
        return Finding(setting, plan, 2 * setting.plays, None, bound, time.monotonic() - began, share)
    if setting.config.pipeline.stages > 1:
        plan, evidence = audit_pipeline(setting)
    else:
        plan, evidence = audit_one_run(setting)
    scores = np.sum([log_ratio(of_step, plan.sample_rate) for of_step in evidence], axis=0)
    power = power_if_clipped(plan, codes=setting.model == "codes")
    inside, out = choose_guesses(power, plan.sample_rate, plan.steps, setting.canaries, plan.delta)
    guesses, correct = inside + out, count_right(scores, present_canaries(setting), inside, out)
    bound = one_run_epsilon(correct, guesses, setting.canaries, plan.delta)
    return Finding(setting, plan, guesses, correct, bound, time.monotonic() - began)


TABLE = Path("results/trust/audit.csv")
"""The file that `--all` writes."""
EXAMPLES = """examples:
  python -m groupwise.audit clip=adaptive_layer privacy.epsilon=3
  python -m groupwise.audit clip=flat privacy.epsilon=1 noise=weighted --design poisson
  python -m groupwise.audit clip=per_device pipeline.stages=2
  python -m groupwise.audit clip=adaptive_layer clip.quantile_budget=0.9 --design counts
  python -m groupwise.audit task=sst2 model=roberta_tiny model.dropout=0.1 clip=adaptive_layer privacy.epsilon=3
  python -m groupwise.audit --all
exit codes: 0 no bound above its claim, 1 a bound above its claim, 2 a mistake on the command line"""


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Audit, print the result, and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m groupwise.audit",
        description=(
            "Attack a clipping mode with canaries in a real run, and print a lower bound on epsilon. A bound below the "
            "claim does not prove the claim. A bound above the claim disproves it."
        ),
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "overrides", nargs="*", metavar="KEY=VALUE", help="clip=, noise=, privacy= as for run.py; task= for a real task"
    )
    designs = "; ".join(f"{name}: {design.says}" for name, design in DESIGNS.items())
    parser.add_argument("--design", default="full", choices=DESIGNS, help=designs)
    parser.add_argument("--canaries", type=int, help="number of canaries (default: depends on the design)")
    parser.add_argument("--plays", type=int, default=PLAYS, help="runs in each of the two worlds, for a real task")
    parser.add_argument("--seed", type=int, default=0, help="seed of canaries and noise, to repeat an audit")
    parser.add_argument("--all", action="store_true", help=f"audit every mode, budget and design, and write {TABLE}")
    parser.error = _refuse  # type: ignore[method-assign]
    given = parser.parse_intermixed_args(arguments)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if given.all:
                return audit_all(given)
            names = ("design", "canaries", "seed", "plays")
            finding = audit_mode(make_setting(given.overrides, **{name: getattr(given, name) for name in names}))
    except ProcessFailed as error:
        report(error)
        return BUG
    except COMPOSITION_ERRORS as error:
        raise UserError(in_one_sentence(error)) from error
    print(describe(finding))
    return 0 if finding.kept else 1


def _refuse(message: str) -> NoReturn:
    raise UserError(f"{message}; --help lists the options.")


EPSILONS = (1, 3)
"""Budgets that these numbers of canaries and plays can refute. 320 right guesses of 320 refute at most ε = 4.6."""
ALL_PLAYS = 300
DROPOUT = 0.1
MODES = (
    *("flat", "ghost", "fixed_layer", "adaptive_layer", "fixed_block", "adaptive_block"),
    *("adaptive_flat", "per_device", "adaptive_device"),
)
Cell = tuple[str, Sequence[str]]
"""A design and overrides."""


def everything() -> list[tuple[int, Cell]]:
    """Return the audits of `--all`, (ε, cell), in the order of their seeds. Add new ones at the end.

    Real tasks are audited only at the largest budget, since their few plays cannot test a small one.
    """
    adaptive = ["clip=adaptive_layer"]
    canaries: list[Cell] = [
        *((design, [f"clip={mode}"]) for mode in MODES for design in ("full", "poisson")),
        *(("full", [*adaptive, f"noise={noise}"]) for noise in ("equal_budget", "weighted")),
        *(("full", [*adaptive, f"clip.quantile_budget={budget}"]) for budget in (0.1, 0.5)),
        ("full", ["clip=fixed_layer", "clip.rule=automatic"]),
        *(("counts", [*adaptive, f"clip.quantile_budget={budget}"]) for budget in (0.1, 0.9)),
    ]
    text = ["task=sst2", "model=roberta_tiny", f"model.dropout={DROPOUT}", f"model.attention_dropout={DROPOUT}"]
    real: list[Cell] = [("worlds", [*text, "clip=flat"]), ("worlds", ["task=cifar", "clip=flat"])]
    return [*((epsilon, cell) for epsilon in EPSILONS for cell in canaries), *((max(EPSILONS), cell) for cell in real)]


def audit_all(given: argparse.Namespace) -> int:
    """Audit `everything`, each with its own seed, write `TABLE`, and return the exit code."""
    if given.overrides:
        raise UserError("--all chooses modes, models and designs: give only --seed with it.")
    rows: list[dict[str, str]] = []
    broken = 0
    todo = everything()
    for number, (epsilon, (design, overrides)) in enumerate(todo, 1):
        overrides = [*overrides, f"privacy.epsilon={epsilon}"]
        finding = audit_mode(make_setting(overrides, design=design, plays=ALL_PLAYS, seed=given.seed + number))
        broken += not finding.kept
        rows.append(row_of(finding))
        print(f"[{number}/{len(todo)}] {describe(finding)}", file=sys.stderr)
    rows.sort(key=lambda row: [_number(text) for text in row.values()])
    write_text(TABLE, csv_text(rows[0], (row.values() for row in rows)))
    print(f"{len(rows)} audits; {broken} bounds above their claim. {TABLE}")
    return 1 if broken else 0


def row_of(finding: Finding) -> dict[str, str]:
    """Return the row of a finding in `TABLE`."""
    setting, plan = finding.setting, finding.plan
    config = setting.config
    rule = "" if config.clip.rule == "min" else f" {config.clip.rule}"
    return {
        "mode": config.clip.name + rule,
        "model": "pipeline" if config.pipeline.stages > 1 else setting.model,
        "noise": config.noise.allocation,
        "quantile_budget": f"{plan.quantile_budget:g}",
        "dropout": f"{config.model.dropout or 0:g}",
        "design": setting.design,
        "steps": str(plan.steps),
        "sample_rate": f"{plan.sample_rate:g}",
        "groups": str(plan.num_groups),
        "delta": f"{plan.delta:g}",
        "canaries": str(setting.canaries),
        "guesses": str(finding.guesses),
        "correct": "" if finding.correct is None else str(finding.correct),
        "confidence": f"{CONFIDENCE:g}",
        "seed": str(setting.seed),
        "epsilon_claimed": f"{plan.epsilon:.4g}",
        "epsilon_lower": f"{finding.bound:.3f}",
    }


def describe(finding: Finding) -> str:
    """Return the text for one audit: a line for each column that has a value, and the verdict."""
    said = row_of(finding)
    if finding.share is not None:
        said |= {"plays": f"{finding.setting.plays} of each world", "share": f"{finding.share:.0%} of the sensitivity"}
    lines = [f"  {name:24}{value}" for name, value in said.items() if value]
    verdict = "no bound above the claim" if finding.kept else "BROKEN: the bound is above the claim"
    return "\n".join([f"clip={said['mode']}", *lines, f"  {verdict}; {finding.seconds:.0f} s"])


def _number(text: str) -> tuple[float, str]:
    try:
        return float(text), ""
    except ValueError:
        return 0.0, text


if __name__ == "__main__":
    sys.exit(main())
