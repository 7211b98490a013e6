"""Run `run.py` with broken and unusual command lines, data files, models and checkpoints.

    python -m trust.bad_input                          all attempts, about a quarter of an hour on two cores
    python -m trust.bad_input --configs 200 --files 50 --seed 1

Each attempt must run, or end with a one-sentence error and exit code 2, leave no files behind and write none elsewhere.
The command prints a table and exits with 1 if an attempt has a defect. It writes results/trust/bad_input.csv where
neither --configs nor --files is given.
"""

import argparse
import gc
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from groupwise.atomic import write_text
from trust.bad_input.attempt import DEFECTS, ROOT, attempt_all, load_program
from trust.bad_input.configs import config_attempts
from trust.bad_input.files import file_attempts, make_templates
from trust.bad_input.surroundings import surrounding_attempts
from trust.faults.process import warm as prepare

RESULTS = ROOT / "results" / "trust" / "bad_input.csv"
VERDICTS = ("ran", "accepted", "refused", "stopped", *DEFECTS)
SECONDS = 40.0
"""CPU time limit of one attempt; one that takes longer is `stopped`."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m trust.bad_input", description=__doc__.splitlines()[0])
    parser.add_argument("--configs", type=int, default=2100, help="number of command lines (2100)")
    parser.add_argument("--files", type=int, default=660, help="number of damaged files and folders (660)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random choices (0)")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)), help="processes (all cores)")
    parser.add_argument("--out", type=Path, help="where the table is written, whatever the numbers are")
    given = parser.parse_args(arguments)
    usual = all(getattr(given, name) == parser.get_default(name) for name in ("configs", "files"))
    found: list[tuple[str, str]] = []
    defects = 0
    with tempfile.TemporaryDirectory(prefix="groupwise-templates-") as folder:
        warm(Path(folder) / "cache")
        make_templates(templates := Path(folder) / "templates")
        attempts = [
            *config_attempts(given.seed, given.configs),
            *surrounding_attempts(),
            *file_attempts(given.seed, given.files, templates),
        ]
        for done, outcome in enumerate(attempt_all(attempts, SECONDS, given.workers), start=1):
            found.append((outcome.attempt.kind, outcome.verdict))
            if outcome.verdict in DEFECTS:
                defects += 1
                shown = f"{outcome.verdict}: {outcome.attempt.kind}: {outcome.attempt.arguments!a}\n{outcome.output}"
                print(f"\n{shown}", file=sys.stderr)
            if done % 50 == 0 or done == len(attempts):
                print(f"{done} of {len(attempts)} tried, {defects} defects", file=sys.stderr)
    table = pd.crosstab(*(pd.Series(each) for each in zip(*found, strict=True)), margins=True, margins_name="all")
    table = table.reindex(columns=["all", *VERDICTS], fill_value=0).rename(columns={"all": "tried"})
    table = table.rename_axis("kind").reset_index()
    if out := given.out or (RESULTS if usual else None):
        write_text(out, table[:-1].to_csv(index=False, lineterminator="\n"))
    print(table.to_string(index=False))
    return 1 if defects else 0


def warm(cache: Path) -> None:
    """Import all modules of an attempt and compose one configuration, so that a fork of this process starts quickly.

    It uses one thread, as a fork does not inherit the others.
    """
    os.environ.update(GROUPWISE_CACHE=str(cache), OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false")
    os.environ.update(PYTHONDONTWRITEBYTECODE="1", HF_HUB_DISABLE_TELEMETRY="1", HF_HOME=str(cache / "huggingface"))
    os.environ.pop("GROUPWISE_DATA", None)
    sys.dont_write_bytecode = True
    cache.mkdir(parents=True, exist_ok=True)
    prepare()
    from groupwise.torchvision_import import import_torchvision_first

    import_torchvision_first()
    import datasets  # noqa: F401
    import dp_accounting  # noqa: F401
    import peft  # noqa: F401
    import prv_accountant  # noqa: F401

    import groupwise.sweeps.best
    import groupwise.tasks.text_classification
    import groupwise.tasks.text_generation  # noqa: F401
    from groupwise.cli.main import launch

    given, sys.argv = sys.argv, ["run.py", "scale=smoke"]
    launch(load_program().CONF, lambda config: None)
    sys.argv = given
    gc.collect()
    gc.freeze()  # memory that the collector no longer scans stays shared with the forks


if __name__ == "__main__":
    sys.exit(main())
