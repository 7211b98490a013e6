"""Plans a pipeline from the command line:  python -m groupwise.planner model=gpt3_175b devices=16 memory=32GB

`--help` lists the options. Exit codes: 0, 2 for a mistake or a model that does not fit.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Sequence

from groupwise.errors import UserError
from groupwise.planner.options import HELP, parse

MISTAKE, INTERRUPTED = 2, 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a plan; returns the exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if {"-h", "--help"} & set(given):
        print(HELP)
        return 0
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    try:
        options = parse(given)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from groupwise.planner.estimate import Estimate
            from groupwise.planner.planner import make_plan, report

            if options.parts > 1:
                from groupwise.planner.parts import told

                print(told(options))
            else:
                print(report(make_plan(Estimate(options))))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return MISTAKE
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    return 0


if __name__ == "__main__":
    sys.exit(main())
