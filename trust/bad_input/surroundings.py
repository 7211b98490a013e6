"""Runs command lines with wrong environment variables, files in place of folders, and wrong results."""

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from trust.bad_input.attempt import Attempt, words
from trust.bad_input.configs import VALUES

RUN = words("scale=smoke privacy=noiseless task=cifar clip=flat train.steps=1 train.device=cpu")
E2E = ("task=e2e", "eval.generate.limit=0")
DATA = ("data.name=cifar10",)
FOLDERS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("results", "a file", ()),
    ("results/runs", "a file", ()),
    ("results", "-> results", ()),
    ("results", "-> /nowhere/at/all", ()),
    ("results/runs", "-> /dev/null", ()),
    ("results", "a pipe", ()),
    ("out", "a file", ("paths.results=out",)),
    ("out", "a file", ("paths.results=out/deeper",)),
    ("out", "a file", (*E2E, "export=out")),
    ("out", "a file", (*E2E, "export=out/deeper")),
    ("out", "-> out", (*E2E, "export=out")),
    ("data", "a file", DATA),
    ("data", "-> data", DATA),
    ("resumed/config.yaml", "seed: 1\n", ("resume=resumed",)),
    ("resumed/other", "a file", ("resume=resumed",)),
    ("resumed", "a file", ("resume=resumed",)),
    ("w/model.pt", "a file", ("model.weights=w",)),
    ("w/other", "a file", ("model.weights=w",)),
)
"""(path, what is put there: a file with that text, a link or a pipe; the command line)."""


def put(name: str, what: str, folder: Path) -> None:
    """Put the file, link or pipe there."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    if what == "a pipe":
        os.mkfifo(path)
    elif what.startswith("-> "):
        path.symlink_to(what.removeprefix("-> "))
    else:
        path.write_text(what)


def surrounding_attempts() -> Iterator[Attempt]:
    """One attempt for each environment variable and each of `FOLDERS`; all are run."""
    for variables in VALUES["environment"]:
        yield Attempt("environment", RUN, environment=variables, trains=True)
    for name, what, given in FOLDERS:
        yield Attempt("folder in the way", (*RUN, *given), partial(put, name, what), trains=True)
