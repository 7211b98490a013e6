"""Writes the report:  python -m groupwise.analysis.report [--out results/report.html]"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from groupwise.analysis.paper import Folders
from groupwise.analysis.report.page import LIGHT, render
from groupwise.atomic import write_text
from groupwise.errors import UserError


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m groupwise.analysis.report", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("results/report.html"))
    Folders.add_options(parser)
    parser.add_argument("--docs", type=Path, default=Path("docs"))
    given = parser.parse_args(arguments)
    try:
        page, left_out = render(Folders.given(given), given.docs, given.out)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    given.out.parent.mkdir(parents=True, exist_ok=True)
    write_text(given.out, page)
    for name, reason in left_out.items():
        print(f"left out: {name}: {reason}", file=sys.stderr)
    size = len(page.encode())
    print(f"{given.out}: {size / 1e6:.2f} MB")
    if size > LIGHT:
        print(f"warning: the page is larger than {LIGHT / 1e6:g} MB.", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
