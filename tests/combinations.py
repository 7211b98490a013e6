"""Lists the valid combinations of task, clipping mode and scale in `conf/`, and small subsets that cover every pair."""

import re
from collections.abc import Iterable
from functools import cache
from itertools import combinations, product
from pathlib import Path

import pytest

from groupwise.config.compose import compose_run
from groupwise.config.keys import groups
from groupwise.config.schema import RunConfig

Cell = tuple[str, ...]
CONF = Path(__file__).parents[1] / "conf"
OPTIONS = groups(CONF)
FAMILIES = {
    task: re.findall(r"override /recipe: (\w+)", (CONF / "task" / f"{task}.yaml").read_text())[0]
    for task in OPTIONS["task"]
}
SCALES = {
    task: sorted(file.stem for file in (CONF / "size" / family).glob("*.yaml")) for task, family in FAMILIES.items()
}
REPRESENTED = {"dart": "e2e", "mnli": "sst2", "qnli": "sst2", "qqp": "sst2"}
"""Tasks that differ from another task of their family in one or two values: one mode of each is tested."""
NO_PIPELINE = [("samsum_pipeline", mode) for mode in ("flat", "adaptive_flat", "ghost")]
CELLS = [
    cell
    for task in FAMILIES
    for cell in product([task], OPTIONS["clip"][-1 if task in REPRESENTED else 0 :], SCALES[task])
    if cell[:2] not in NO_PIPELINE
]
"""Task, mode and scale that are valid together."""


@cache  # composing costs a tenth of a second, and no test changes what it gets
def run(*overrides: str) -> RunConfig:
    """The configuration that these command-line overrides compose; equal overrides are composed once."""
    return compose_run(list(overrides), CONF)


def pairwise(cells: Iterable[Cell]) -> list[Cell]:
    """A subset that covers every pair of values found in any of `cells`; cells with most new pairs are taken first."""
    left, taken, covered = list(cells), list[Cell](), set[frozenset[tuple[int, str]]]()
    for least in (3, 2, 1):
        for cell in list(left):
            pairs = {frozenset(pair) for pair in combinations(enumerate(cell), 2)}
            if len(pairs - covered) >= least:
                covered |= pairs
                taken.append(cell)
                left.remove(cell)
    return taken


def each_value_once(cells: Iterable[Cell]) -> list[Cell]:
    """The cells with a value that no earlier cell has, which together contain every value."""
    seen: set[str] = set()
    return [cell for cell in cells if not seen.issuperset(cell) and (seen.update(cell) or True)]


def pairs_fast(cells: Iterable[Cell]) -> list[object]:
    """All of `cells` as parameters of a test; those outside of `pairwise` are marked slow."""
    every = list(cells)
    fast = set(pairwise(every))
    return [pytest.param(*cell, marks=[] if cell in fast else [pytest.mark.slow]) for cell in every]
