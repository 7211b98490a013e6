"""The audit's command line; `groupwise.privacy.audit` is where it is called from."""

import argparse
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from groupwise.audit.canaries import MODELS
from groupwise.audit.options import DESIGNS, PLAYS, make_setting
from groupwise.errors import ProcessFailed, UserError
from groupwise.launch.mistakes import COMPOSITION_ERRORS, in_one_sentence

EXAMPLES = """examples:
  python -m groupwise.privacy.audit clip=adaptive_layer privacy.epsilon=8
  python -m groupwise.privacy.audit clip=flat privacy.epsilon=1 noise=weighted --design poisson
  python -m groupwise.privacy.audit clip=per_device pipeline.stages=2
  python -m groupwise.privacy.audit clip=adaptive_layer clip.quantile_budget=0.9 --design counts
  python -m groupwise.privacy.audit clip=flat --dropout 0.1
  python -m groupwise.privacy.audit task=sst2 model=roberta_tiny model.dropout=0.1 clip=adaptive_layer privacy.epsilon=3
  python -m groupwise.privacy.audit --all
exit codes: 0 no bound above its claim, 1 a bound above its claim, 2 a mistake on the command line"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Audit, and print a table; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m groupwise.privacy.audit",
        description=(
            "Attack a clipping mode with canaries in one real run, and show how much epsilon that proves at least. "
            "A bound below the claim is no proof of the claim; a bound above it is proof against it."
        ),
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "overrides", nargs="*", metavar="KEY=VALUE", help="clip=, noise=, privacy= as for run.py; or task="
    )
    designs = "; ".join(f"{name}: {design.says}" for name, design in DESIGNS.items())
    parser.add_argument("--design", default="full", help=designs)
    parser.add_argument("--model", default="layers", help=f"one of {', '.join(MODELS)}")
    parser.add_argument("--canaries", type=int, help="how many (default: the design's)")
    parser.add_argument("--dropout", type=float, default=0.0, help="its rate in the canaries' model")
    parser.add_argument("--plays", type=int, default=PLAYS, help="of each of two worlds, for a real task")
    parser.add_argument("--seed", type=int, default=0, help="of canaries and noise, so that an audit can be repeated")
    parser.add_argument("--confidence", type=float, default=0.95, help="of the lower bound")
    parser.add_argument(
        "--all", action="store_true", help="every mode, budget and design, into results/trust/audit.csv"
    )
    parser.add_argument("--out", type=Path, default=Path("results/trust/audit.csv"), help="where --all writes")
    parser.error = _refuse  # type: ignore[method-assign]
    try:
        given = parser.parse_intermixed_args(arguments)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return _all(given) if given.all else _one(given)
    except (ProcessFailed, *COMPOSITION_ERRORS) as error:
        print(f"error: {in_one_sentence(error)}", file=sys.stderr)
        return 2 if not isinstance(error, ProcessFailed) else 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def _refuse(message: str) -> NoReturn:
    raise UserError(f"{message}; --help shows what can be given.")


def _one(given: argparse.Namespace) -> int:
    setting = make_setting(
        given.overrides,
        design=given.design,
        model=given.model,
        canaries=given.canaries,
        seed=given.seed,
        confidence=given.confidence,
        dropout=given.dropout,
        plays=given.plays,
    )
    from groupwise.audit.game import play
    from groupwise.audit.table import describe

    finding = play(setting)
    print(describe(finding))
    return 0 if finding.kept else 1


def _all(given: argparse.Namespace) -> int:
    beside = (given.canaries, given.dropout, given.design != "full", given.model != "layers", given.plays != PLAYS)
    if given.overrides or any(beside):
        raise UserError("--all chooses modes, models and designs itself: give it --seed, --confidence and --out only.")
    from groupwise.audit.table import audit_all

    return audit_all(given.out, given.seed, given.confidence)
