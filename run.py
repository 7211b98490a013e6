"""Train one private model, or a sweep of them:  python run.py task=cifar clip=adaptive_layer scale=demo

Composes the configuration in `conf/`, checks it and hands it to `groupwise.cli`. A mistake on the
command line is one sentence and exit code 2.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from groupwise.config.schema import RunConfig

CONF = Path(__file__).resolve().parent / "conf"
VENV = CONF.parent / ".venv"


def train(config: RunConfig) -> float | None:
    """Run one cell, and return what a search goes by; torch is imported only now: help and mistakes answer at once."""
    from groupwise.processes.start import start
    from groupwise.sweeps.best import search_metric

    return search_metric(start(config))


def main() -> int:
    """Return the exit code: 0 done, 1 a bug, 2 a mistake in one sentence, 130 interrupted."""
    try:
        from groupwise.cli.main import launch
    except ModuleNotFoundError as error:
        cure = "`make env`, or pip install -e '.[suite,language]'"
        if (VENV / ".complete").exists() and Path(sys.prefix).resolve() != VENV:
            cure = f"`. {os.path.relpath(VENV)}/bin/activate`, which make env made"
        print(f"error: run.py needs {error.name}, which is not installed here: {cure}.", file=sys.stderr)
        return 2
    return launch(CONF, train)


if __name__ == "__main__":
    try:
        code = main()
        sys.stdout.flush()
    except BrokenPipeError:  # whoever reads has enough:  python run.py --help | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is buffered goes nowhere at exit
        code = 0
    sys.exit(code)
