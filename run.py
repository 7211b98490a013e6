"""Train one private model, or a sweep of them:  python run.py task=cifar clip=adaptive_layer scale=demo

Composes the configuration in `conf/`, checks it and hands it to `groupwise.launch`. A mistake on the
command line is one sentence and exit code 2.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from groupwise.config import RunConfig

CONF = Path(__file__).resolve().parent / "conf"


def train(config: RunConfig) -> None:
    """Run one cell; torch is imported only now, so that help and mistakes answer at once."""
    from groupwise.launch.processes import start

    start(config)


def main() -> int:
    if {"-h", "--help"} & set(sys.argv[1:]):
        from groupwise.launch.help import help_text

        print(help_text(CONF))
        return 0
    from groupwise.launch.command import launch

    return launch(CONF, train)


if __name__ == "__main__":
    sys.exit(main())
